"""What is wrong or doubtful in a checkpoint: everything at once, as findings; no torch is needed here."""

from vtensors.verification.codes import CODES, markdown_table
from vtensors.verification.findings import Finding, finding, finding_of
from vtensors.verification.opening import Opened, open_tolerantly
from vtensors.verification.structure import structure_findings

__all__ = [
    "CODES",
    "Finding",
    "Opened",
    "finding",
    "finding_of",
    "markdown_table",
    "open_tolerantly",
    "structure_findings",
]
