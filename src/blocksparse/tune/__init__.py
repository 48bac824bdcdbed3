"""Tuning: what attends in each layer of a model, chosen by what the model's own outputs lose.

plan = tune(model, prompts, held, journal=Path("plan.journal"))
attach(model, plan.schedule(model))
"""

from blocksparse.plans.candidate import Candidate as Candidate
from blocksparse.plans.errors import TuneError as TuneError
from blocksparse.plans.fingerprint import Fingerprint as Fingerprint
from blocksparse.plans.plan import AtLength as AtLength
from blocksparse.plans.plan import Evidence as Evidence
from blocksparse.plans.plan import Part as Part
from blocksparse.plans.plan import Plan as Plan
from blocksparse.plans.plan import Try as Try
from blocksparse.tune.default_candidates import DEFAULT_CANDIDATES as DEFAULT_CANDIDATES
from blocksparse.tune.prompts import TunePrompt as TunePrompt
from blocksparse.tune.prompts import prompts_from_file as prompts_from_file
from blocksparse.tune.prompts import prompts_from_text as prompts_from_text
from blocksparse.tune.run import Budget as Budget
from blocksparse.tune.run import tune as tune
