"""All checks of values, one after the other, over one reading of the files."""

from __future__ import annotations

from vtensors.checkpoint import Checkpoint
from vtensors.reading import TensorReader
from vtensors.verification.findings import Finding
from vtensors.verification.shard_bytes import ShardBytes
from vtensors_plugins.verification.fused_scales import fused_findings
from vtensors_plugins.verification.kinds import subjects
from vtensors_plugins.verification.kv_values import kv_findings
from vtensors_plugins.verification.norms import norm_findings
from vtensors_plugins.verification.report import ProgressBar
from vtensors_plugins.verification.scale_sizes import size_findings
from vtensors_plugins.verification.scanning import scan
from vtensors_plugins.verification.small_values import SmallValues
from vtensors_plugins.verification.tied import tied_findings
from vtensors_plugins.verification.values import plugin_findings, value_findings


def check_values(checkpoint: Checkpoint, bar: ProgressBar) -> tuple[list[Finding], int, int]:
    """(findings, tensors that were read whole, bytes read)."""
    tensors = subjects(checkpoint)
    snapshot = checkpoint.snapshot
    with ShardBytes(snapshot) as source, TensorReader(snapshot, mmap=False) as reader:
        with bar("verify", sum(subject.info.nbytes for subject in tensors)) as progress:
            scanned = scan(tensors, source, progress=progress)
        small = SmallValues(source)
        unreadable = {found.tensor for found in scanned.findings}
        found = [*scanned.findings]
        if not unreadable:
            found.extend(tied_findings(checkpoint, reader))
        found.extend(value_findings(checkpoint, tensors, scanned, reader))
        found.extend(plugin_findings(checkpoint))
        found.extend(size_findings(checkpoint, scanned, small))
        found.extend(fused_findings(checkpoint, small))
        found.extend(kv_findings(checkpoint, small))
        found.extend(norm_findings(checkpoint, small))
    return found, len(tensors) - len(unreadable), scanned.read
