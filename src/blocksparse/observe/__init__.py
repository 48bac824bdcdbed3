"""Audits: what sparse calls cover and how far off they are, estimated while a model runs."""

from blocksparse.observe.audit import Audit as Audit
from blocksparse.observe.audit import AuditedAttention as AuditedAttention
from blocksparse.observe.audit import Crossing as Crossing
from blocksparse.observe.audit import Estimate as Estimate
from blocksparse.observe.audit import LayerAudit as LayerAudit
