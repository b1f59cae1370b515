"""A checkpoint opened as far as its files allow, with a finding for each thing that stands in the way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from vtensors.checkpoint import Checkpoint
from vtensors.claim_reasons import Claimant
from vtensors.configs import CONFIG, HF_QUANT, ConfigFiles
from vtensors.declaring import read_declarations
from vtensors.errors import ArchitectureError, RequestError, VtensorsError
from vtensors.hub import open_source, resolve
from vtensors.manager import Plugins, default_plugins
from vtensors.records import Convention
from vtensors.registry import Owned, Registry
from vtensors.shard_files import ShardSelection
from vtensors.snapshot import Snapshot, assemble
from vtensors.verification.files import read_files
from vtensors.verification.findings import Finding, finding_of


@attrs.frozen(kw_only=True)
class Opened:
    """A checkpoint as far as it could be opened.

    checkpoint: None where no header could be read. findings: about files, index and configuration.
    lost: tensor -> the file that should hold it and could not be read. root: directory or file.
    """

    checkpoint: Checkpoint | None
    findings: tuple[Finding, ...]
    lost: Mapping[str, str]
    root: Path | None


def open_tolerantly(
    source: str | Path, revision: str | None = None, *, plugins: Plugins | None = None
) -> Opened:
    """The checkpoint that `source` names, as far as it can be opened.

    A repository that is not cached is opened by its headers. Errors: HubError or CheckpointError for what is
    no checkpoint at all: nothing there, or a directory without a safetensors file and without an index.
    """
    plugins = plugins if plugins is not None else default_plugins()
    location = resolve(source, revision)
    if location.root is None:
        snapshot = open_source(source, revision)
        opened, findings = _open(snapshot, plugins)
        return Opened(checkpoint=opened, findings=tuple(findings), lost={}, root=None)
    files = read_files(location.root)
    found = tuple(files.findings)
    if not files.headers:
        return Opened(checkpoint=None, findings=found, lost=files.lost, root=location.root)
    # Index and strays have had their findings: here the headers are all that is known.
    selection = ShardSelection(files=tuple(files.headers), weight_map=None, strays=())
    snapshot = assemble(files.folder, location.provenance, selection, files.headers)
    checkpoint, more = _open(snapshot, plugins)
    return Opened(checkpoint=checkpoint, findings=(*found, *more), lost=files.lost, root=location.root)


def _open(snapshot: Snapshot, plugins: Plugins) -> tuple[Checkpoint, list[Finding]]:
    findings: list[Finding] = []
    config, hf_quant = (_read_json(snapshot, name, findings) for name in (CONFIG, HF_QUANT))
    configs = ConfigFiles(config=config, hf_quant=hf_quant)
    claimants, warnings = _declarations(configs, plugins, snapshot.provenance.source, findings)
    checkpoint = Checkpoint(
        snapshot=snapshot,
        configs=configs,
        plugins=plugins,
        switches=plugins.read_switches(),
        claimants=claimants,
        declaring_warnings=warnings,
    )
    try:
        _ = checkpoint.plan
    except ArchitectureError as problem:
        findings.append(finding_of("refused-model", problem, tensor=problem.tensor or CONFIG))
        # Without the architecture, everything that does not depend on it can still be said.
        bare = attrs.evolve(plugins.registry, architectures={})
        checkpoint = attrs.evolve(checkpoint, plugins=_with_registry(plugins, bare))
    return checkpoint, findings


def _with_registry(plugins: Plugins, registry: Registry) -> Plugins:
    return attrs.evolve(plugins, registry=registry)


def _read_json(snapshot: Snapshot, name: str, findings: list[Finding]) -> dict[str, object] | None:
    try:
        return snapshot.read_json(name)
    except RequestError:
        return None
    except VtensorsError as problem:
        findings.append(finding_of("damaged-config", problem, tensor=name))
        return None


def _declarations(
    configs: ConfigFiles, plugins: Plugins, source: str, findings: list[Finding]
) -> tuple[tuple[Claimant, ...], tuple[str, ...]]:
    """Every convention's declaration; a convention that refuses the configuration is asked no further."""
    conventions = dict(plugins.registry.conventions)
    while True:
        asked = _with_registry(plugins, attrs.evolve(plugins.registry, conventions=conventions))
        try:
            return read_declarations(configs, asked, source)
        except VtensorsError as problem:
            refusing = _refusing(configs, conventions)
            # That nobody is left to read a block is no news once its own convention has refused it.
            if refusing is not None or len(conventions) == len(plugins.registry.conventions):
                findings.append(finding_of("refused-declaration", problem, tensor=problem.file or CONFIG))
        if refusing is None:
            # Nobody answers to the block: the conventions are asked as if it were not there.
            return read_declarations(ConfigFiles(), asked, source)
        del conventions[refusing]


def _refusing(configs: ConfigFiles, conventions: Mapping[str, Owned[Convention]]) -> str | None:
    for name, owned in conventions.items():
        try:
            owned.record.declare(configs)
        except VtensorsError:
            return name
        except Exception:  # a broken plugin: read_declarations leaves it out by itself
            continue
    return None
