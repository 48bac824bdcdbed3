"""Tuning: what attends in each layer of a model, chosen by what the model's own outputs lose.

plan = tune(model, prompts, held, journal=Path("plan.journal"))
attach(model, plan.schedule(model))
"""

from blocksparse.presets.named import Candidate as Candidate
from blocksparse.presets.named import TuneError as TuneError
from blocksparse.presets.plan import AtLength as AtLength
from blocksparse.presets.plan import Evidence as Evidence
from blocksparse.presets.plan import Fingerprint as Fingerprint
from blocksparse.presets.plan import Part as Part
from blocksparse.presets.plan import Plan as Plan
from blocksparse.presets.plan import Try as Try
from blocksparse.tools.tune.prompts import TunePrompt as TunePrompt
from blocksparse.tools.tune.prompts import prompts_from_file as prompts_from_file
from blocksparse.tools.tune.prompts import prompts_from_text as prompts_from_text
from blocksparse.tools.tune.run import DEFAULT_CANDIDATES as DEFAULT_CANDIDATES
from blocksparse.tools.tune.run import Budget as Budget
from blocksparse.tools.tune.run import tune as tune
