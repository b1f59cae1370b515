"""The records that plugins and core exchange; all frozen, none needs torch or cupy to be imported."""

from __future__ import annotations

from vtensors.records.architectures import Architecture, ExpectedWeight, Model, ModelPlan, Waiver
from vtensors.records.claims import Claim, ClaimRequest, Refusal, StackedPart, TensorGroup
from vtensors.records.declarations import Conflict, Declaration, DeclaredScheme, KvCacheDeclared
from vtensors.records.kernels import Command, KernelRequest, KernelSpec, Progress, Selected, Switch
from vtensors.records.plugins import API_VERSION, PluginInfo
from vtensors.records.weights import Convention, Scheme, TensorSource, Weight
from vtensors.records.writing import (
    ConventionWriter,
    EncodeOptions,
    Encoder,
    Layout,
    OutputTensor,
    WeightToWrite,
    WrittenCheckpoint,
)

__all__ = [
    "API_VERSION",
    "Architecture",
    "Claim",
    "ClaimRequest",
    "Command",
    "Conflict",
    "Convention",
    "ConventionWriter",
    "Declaration",
    "DeclaredScheme",
    "EncodeOptions",
    "Encoder",
    "ExpectedWeight",
    "KernelRequest",
    "KernelSpec",
    "KvCacheDeclared",
    "Layout",
    "Model",
    "ModelPlan",
    "OutputTensor",
    "PluginInfo",
    "Progress",
    "Refusal",
    "Scheme",
    "Selected",
    "StackedPart",
    "Switch",
    "TensorGroup",
    "TensorSource",
    "Waiver",
    "Weight",
    "WeightToWrite",
    "WrittenCheckpoint",
]
