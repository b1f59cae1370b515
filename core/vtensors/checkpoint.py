"""A checkpoint opened for reading: headers, claims, accounting, and weights on demand."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from vtensors.accounting import Accounting, account
from vtensors.activations import ActivationRequest, Executed, executed_activations
from vtensors.architecture_choice import Knowing, plan_of, who_knows
from vtensors.claim_reasons import Claimant
from vtensors.claiming import Claims, claim_all
from vtensors.configs import CONFIG, HF_QUANT, ConfigFiles
from vtensors.containment import blamed_on
from vtensors.counts import counted
from vtensors.declaring import read_declarations, stale_entries
from vtensors.errors import ArchitectureError, ClaimError, ConflictError
from vtensors.grouping import Grouped, group_tensors
from vtensors.hub import open_source, resolve
from vtensors.kv_scales import KvScales, read_kv_scales
from vtensors.lock import Lock, check_lock, read_lock
from vtensors.manager import Plugins, default_plugins
from vtensors.matching import nearest
from vtensors.modules import Module, find_conflicts, make_modules
from vtensors.provenance import Provenance
from vtensors.reading import TensorReader
from vtensors.records import Architecture, Conflict, KvCacheDeclared, ModelPlan, TensorSource, Weight
from vtensors.snapshot import Snapshot
from vtensors.switches import Switches
from vtensors.tensor_source import MappedTensors

_CONFIG_DTYPES = {"bfloat16": "BF16", "float16": "F16", "half": "F16"}
_WEIGHT_ROLES = {"global_divisor": "global_scale", "input_divisor": "input_scale"}


def open_checkpoint(
    source: str | Path,
    revision: str | None = None,
    *,
    download: bool = False,
    plugins: Plugins | None = None,
    lock: Lock | str | Path | None = None,
) -> Checkpoint:
    """The checkpoint at a path, or of `repo[@revision]`, with its headers read and no weight byte.

    revision: branch, tag or commit of a repository.
    download: whether to fetch a repository that is not cached; without it only its headers are read, by HTTP
    ranges, and `read` refuses.
    plugins: the plugins to use (default: all that are enabled).
    lock: a lock, or the file that `vtensors lock` wrote; compared before anything is downloaded, and after.
    Errors: CheckpointError, HubError and DeclarationError for what cannot be opened at all, LockError where
    anything moved. Tensors that nobody reads are listed by `unclaimed` and refused by `check`.
    """
    plugins = plugins if plugins is not None else default_plugins()
    switches = plugins.read_switches()
    if lock is not None and not isinstance(lock, Lock):
        read_lock(Path(lock))  # refused now, not after a download
    if lock is not None and download and resolve(source, revision).root is None:
        open_checkpoint(source, revision, plugins=plugins, lock=lock)
    snapshot = open_source(
        source, revision, download=download, refuse_stray="files" in switches.names("VT_STRICT")
    )
    configs = ConfigFiles(config=snapshot.read_json(CONFIG), hf_quant=snapshot.read_json(HF_QUANT))
    claimants, warnings = read_declarations(configs, plugins, str(snapshot.provenance.source))
    checkpoint = Checkpoint(
        snapshot=snapshot,
        configs=configs,
        plugins=plugins,
        switches=switches,
        claimants=claimants,
        declaring_warnings=warnings,
    )
    if lock is not None:
        check_lock(checkpoint, lock)
    return checkpoint


@attrs.define(kw_only=True, slots=False)
class Checkpoint:
    """An opened checkpoint; see `open_checkpoint`. Everything below is worked out once, when first asked."""

    snapshot: Snapshot
    configs: ConfigFiles
    plugins: Plugins
    switches: Switches
    claimants: tuple[Claimant, ...]
    declaring_warnings: tuple[str, ...] = ()

    @property
    def provenance(self) -> Provenance:
        """Where it comes from: source, repository, commit, and a header hash per shard."""
        return self.snapshot.provenance

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json, {} where absent."""
        return self.configs.config or {}

    @cached_property
    def _grouped(self) -> Grouped:
        return group_tensors(self.snapshot.tensors.values())

    @cached_property
    def claims(self) -> Claims:
        """Who reads which module."""
        return claim_all(self._grouped.groups, self.claimants, prefer=self.switches.text("VT_PREFER"))

    @cached_property
    def modules(self) -> Mapping[str, Module]:
        """Every module that a convention reads, by name, waived ones included."""
        return make_modules(self.claims.claims, self.claimants)

    @cached_property
    def architecture(self) -> Architecture | None:
        """The architecture plugin that knows config.json, or None. Errors: more than one knows it."""
        found = self._knowing.architectures
        if len(found) > 1:
            raise ArchitectureError(
                "more than one architecture plugin knows this model",
                file=CONFIG,
                seen=", ".join(f"{o.record.name} ({o.distribution})" for o in found),
                fix="deny all but one with VT_PLUGINS=-<plugin>",
            )
        return found[0].record if found else None

    @cached_property
    def _knowing(self) -> Knowing:
        return who_knows(self.plugins.registry.architectures.values(), self.config)

    @property
    def architecture_name(self) -> str:
        """`architectures[0]` of config.json, else its model_type, else `unknown`."""
        named = self.config.get("architectures")
        if isinstance(named, list) and named and isinstance(named[0], str):
            return named[0]
        return str(self.config.get("model_type", "unknown"))

    @cached_property
    def plan(self) -> ModelPlan | None:
        """What the architecture expects, None where no plugin knows the model."""
        if self.architecture is None:
            return None
        return plan_of(self._knowing.architectures[0], self.config, list(self.modules))

    @cached_property
    def accounting(self) -> Accounting:
        """Where every tensor goes: used, waived, unclaimed; and the problems that `check` raises."""
        return account(
            self.modules,
            self.claims,
            self._grouped,
            self.plan,
            config_dtype=_CONFIG_DTYPES.get(str(self.configs.dtype)),
            declared_nothing=not self.configs.blocks() and self.configs.hf_quant is None,
        )

    @property
    def unclaimed(self) -> tuple[str, ...]:
        """Tensors that nobody reads and nothing waives."""
        return self.accounting.unclaimed

    @cached_property
    def conflicts(self) -> tuple[Conflict, ...]:
        """Statements that contradict one another: between files, and between files and tensors."""
        declared = [c.declaration for c in self.claimants if c.declaration is not None]
        return (*(k for d in declared for k in d.conflicts), *find_conflicts(self.modules.values()))

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Sentences for the user: stray files, failed conventions, entries that match nothing."""
        declared = [c.declaration for c in self.claimants if c.declaration is not None]
        return (
            *self.snapshot.warnings,
            *self.declaring_warnings,
            *self.claims.warnings,
            *self._knowing.warnings,
            *(warning for d in declared for warning in d.warnings),
            *stale_entries(self.claimants, self.modules, self.plan),
            *(self.plan.notes if self.plan else ()),
        )

    @property
    def kv_cache(self) -> KvCacheDeclared | None:
        """What is declared of the KV cache."""
        return next(
            (c.declaration.kv_cache for c in self.claimants if c.declaration and c.declaration.kv_cache), None
        )

    def executed(self, name: str, request: ActivationRequest) -> Executed:
        """At which activation precision the module would run under the request."""
        module = self.modules[name]
        return executed_activations(module.claim, module.declared_scheme, request)

    def activation_request(self, argument: str | None = None) -> ActivationRequest:
        """The user's argument together with the switches as read when the checkpoint was opened."""
        return ActivationRequest(
            argument=argument,
            modelopt_w4a4=self.switches.flag("VT_MODELOPT_W4A4"),
            fp8_w8a8=self.switches.flag("VT_FP8_W8A8"),
        )

    def check(self) -> None:
        """Refuses what a load must not pass: unclaimed, missing, unexpected or misfitting tensors.

        Errors: the first problem, with the names of the others; ConflictError under `VT_STRICT=conflicts`.
        """
        problems = self.accounting.problems
        if problems:
            first_problem = problems[0]
            if len(problems) > 1:
                others = [str(p.tensor) for p in problems[1:6]]
                more = len(problems) - 1
                first_problem.args = (
                    f"{first_problem.args[0]}\n  and {more} more: {', '.join(others)}"
                    + (" ..." if more > 5 else ""),
                )
            raise first_problem
        if self.conflicts and "conflicts" in self.switches.names("VT_STRICT"):
            conflict = self.conflicts[0]
            raise ConflictError(
                f"VT_STRICT=conflicts refuses {counted(len(self.conflicts), 'contradiction')}",
                file=conflict.where,
                seen=f"{conflict.says}; {conflict.instead}",
                fix="correct the configuration files, or unset VT_STRICT",
            )

    @cached_property
    def _source(self) -> MappedTensors:
        return MappedTensors(TensorReader(self.snapshot, mmap=self.switches.flag("VT_MMAP")))

    def read(self, name: str) -> Weight:
        """The weight of a module in canonical form, its values checked; only its own bytes are touched.

        Errors: ClaimError for a name that is not a claimed module (with the reasons, or the nearest name),
        WeightValueError for scales or codes that no writer means.
        """
        return self.read_from(name, self._source)

    def read_from(self, name: str, source: TensorSource) -> Weight:
        """As `read`, out of tensors that lie elsewhere. source: gives each tensor of the module's claim."""
        module = self.modules.get(name)
        if module is None:
            raise self._unknown(name)
        owned = self.plugins.registry.conventions[module.convention]
        with blamed_on(owned, f"reading '{name}': the convention '{module.convention}'"):
            weight = owned.record.read(module.claim, source)
            if (weight.scheme, tuple(weight.shape)) != (module.scheme, module.shape):
                found = f"{weight.scheme} {list(weight.shape)}"
                raise TypeError(f"gave {found} for a claim on {module.scheme} {list(module.shape)}")
            weight.check_values(
                {_WEIGHT_ROLES.get(role, role): info.name for role, info in module.claim.roles.items()}
            )
        return weight

    def kv_scales(self) -> dict[str, KvScales]:
        """attention module -> its KV-cache scales, under any of the accepted names."""
        return read_kv_scales(self._grouped.kv_scales, self._source)

    def check_mapped(self) -> None:
        """Raises CheckpointError if a file that weights are mapped from was truncated or written to."""
        self._source.reader.check_mapped()

    def close(self) -> None:
        """Close the files; weights that were read stay valid."""
        self._source.reader.close()

    def _unknown(self, name: str) -> ClaimError:
        unclaimed = self.claims.unclaimed.get(name)
        if unclaimed is not None:
            return ClaimError(
                f"{unclaimed.readers} this module",
                file=str(self.provenance.source),
                tensor=name,
                seen=unclaimed.describe(),
                fix=unclaimed.fix,
            )
        near = nearest(name, self.modules)
        return ClaimError(
            "no such module in the checkpoint",
            file=str(self.provenance.source),
            tensor=name,
            seen=repr(name),
            accepted=f"a module's name without '.weight'{f', for example {near!r}' if near else ''}",
            fix="list the modules with `vtensors inspect --tree`",
        )
