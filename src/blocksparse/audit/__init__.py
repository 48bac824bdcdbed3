"""Audits: what sparse calls cover and how far off they are, estimated while a model runs."""

from blocksparse.audit.audit import Audit as Audit
from blocksparse.audit.audited_pipeline import AuditedPipeline as AuditedPipeline
from blocksparse.audit.estimate import Estimate as Estimate
from blocksparse.audit.layer_audit import Crossing as Crossing
from blocksparse.audit.layer_audit import LayerAudit as LayerAudit
