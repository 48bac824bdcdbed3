"""Tuning: what attends in each layer of a model, chosen by what the model's own outputs lose.

plan = tune(model, prompts, held, journal=Path("plan.journal"))
attach(model, plan.schedule(model))
"""

from blocksparse.tune.candidate import DEFAULT_CANDIDATES as DEFAULT_CANDIDATES
from blocksparse.tune.candidate import Candidate as Candidate
from blocksparse.tune.errors import TuneError as TuneError
from blocksparse.tune.fingerprint import Fingerprint as Fingerprint
from blocksparse.tune.plan import Evidence as Evidence
from blocksparse.tune.plan import Part as Part
from blocksparse.tune.plan import Plan as Plan
from blocksparse.tune.plan import Try as Try
from blocksparse.tune.prompts import TunePrompt as TunePrompt
from blocksparse.tune.prompts import prompts_from_file as prompts_from_file
from blocksparse.tune.prompts import prompts_from_text as prompts_from_text
from blocksparse.tune.run import Budget as Budget
from blocksparse.tune.run import tune as tune
