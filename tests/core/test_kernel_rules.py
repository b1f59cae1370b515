"""`VT_KERNELS`: what is read, what is refused, and what it does to a choice."""

from __future__ import annotations

import pytest

from kernel_specs import DECOMPOSE, chosen, kernel, reference, request
from vtensors.errors import SwitchError, VtensorsError
from vtensors.kernel_rules import KernelRules
from vtensors.manager import Plugins
from vtensors.records import KernelSpec
from vtensors.selection import plan_kernels, replan
from vtensors.switches import Switches
from vtensors_plugins.switches import vtensors_switches

KERNELS = [
    kernel("linear_nvfp4_fast", cost=1.0),
    kernel("linear_nvfp4_slow", cost=5.0),
    kernel("linear_nvfp4_decode", cost=7.0, tokens=(1, 32)),
    kernel("linear_fp8_fast", schemes=("fp8-row", "fp8-tensor")),
    kernel("embedding_nvfp4", op="embedding"),
    reference(),
    reference("embedding"),
]
SCHEMES = ("bf16", "nvfp4", "fp8-row", "fp8-tensor")


def rules(text: str, kernels: list[KernelSpec] = KERNELS) -> KernelRules:
    return KernelRules.parse(text, kernels, SCHEMES)


def test_the_switch_is_declared_and_empty() -> None:
    switches = Switches.read(vtensors_switches(), {})
    assert rules(switches.text("VT_KERNELS")).rules == ()
    assert switches.flag("VT_AUTOTUNE") is False


def test_entries_are_scheme_and_kernel_globs_with_a_mark_for_forbidding() -> None:
    forced, forbidden = rules(" nvfp4:linear_nvfp4_* , fp8-*:!linear_fp8_fast,").rules
    assert (forced.scheme, forced.kernel, forced.forbids) == ("nvfp4", "linear_nvfp4_*", False)
    assert (forbidden.scheme, forbidden.kernel, forbidden.forbids) == ("fp8-*", "linear_fp8_fast", True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "nvfp4:linear_nvfp4_fest",
            ("names a kernel", "linear_nvfp4_slow", "did you mean linear_nvfp4_fast?"),
        ),
        ("nvpf4:linear_nvfp4_fast", ("names a scheme", "fp8-row", "did you mean nvfp4?")),
        ("nvfp4:!linear_x*", ("names a kernel", "'linear_x*' in 'nvfp4:!linear_x*'")),
        ("linear_nvfp4_fast", ("not `scheme:kernel`", "write *:linear_nvfp4_fast")),
        ("nvfp4", ("not `scheme:kernel`", "write nvfp4:<kernel>")),
        ("!linear_nvfp4_fast", ("not `scheme:kernel`", "write *:!linear_nvfp4_fast")),
        ("nvfp4:", ("not `scheme:kernel`", "'nvfp4:'")),
        (":!", ("not `scheme:kernel`",)),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_accepted_names(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(SwitchError) as caught:
        rules(text)
    for word in ("VT_KERNELS", *words):
        assert word in str(caught.value)


def test_a_forced_kernel_wins_over_a_cheaper_one_which_keeps_that_reason() -> None:
    plan = plan_kernels(request(), KERNELS, rules("nvfp4:*_slow"))
    assert chosen(plan) == {(1, None): "linear_nvfp4_slow"}
    assert ("linear_nvfp4_fast", "VT_KERNELS asks for nvfp4:*_slow") in plan.rejected


def test_among_several_forced_kernels_cost_decides() -> None:
    assert chosen(plan_kernels(request(), KERNELS, rules("nvfp4:*_slow,nvfp4:*_fast"))) == {
        (1, None): "linear_nvfp4_fast"
    }


def test_a_forced_kernel_is_forced_for_the_rows_that_it_serves() -> None:
    assert chosen(plan_kernels(request(), KERNELS, rules("nvfp4:*_decode"))) == {
        (1, 32): "linear_nvfp4_decode",
        (33, None): "linear_nvfp4_fast",
    }


def test_a_forbidden_kernel_is_left_out_with_its_rule() -> None:
    plan = plan_kernels(request(), KERNELS, rules("nvfp4:!*_fast"))
    assert chosen(plan) == {(1, None): "linear_nvfp4_slow"}
    assert ("linear_nvfp4_fast", "VT_KERNELS forbids it (nvfp4:!*_fast)") in plan.rejected


def test_a_forced_kernel_that_cannot_serve_is_an_error_with_the_rule_and_every_candidate() -> None:
    kernels = [*KERNELS, kernel("linear_nvfp4_picky", refuse=lambda request: "K is not a multiple of 128")]
    with pytest.raises(VtensorsError, match="no kernel computes 'linear' on nvfp4") as caught:
        plan_kernels(request(), kernels, rules("nvfp4:*_picky", kernels))
    text = str(caught.value)
    assert "linear_nvfp4_picky: K is not a multiple of 128" in text
    for other in ("linear_nvfp4_fast", "linear_nvfp4_slow", "linear_reference"):
        assert f"{other}: VT_KERNELS asks for nvfp4:*_picky" in text
    assert text.startswith("under VT_KERNELS=nvfp4:*_picky no kernel computes")
    assert text.splitlines()[2].strip() == "linear_nvfp4_picky: K is not a multiple of 128"
    assert "linear_fp8_fast" not in text
    assert "1 that computes other schemes, not nvfp4" in text
    assert "change VT_KERNELS" in text


def test_a_forced_kernel_for_another_device_is_an_error_but_a_glob_takes_those_that_fit() -> None:
    kernels = [*KERNELS, kernel("linear_nvfp4_hopper", targets=("sm_90a",), cost=20.0)]
    with pytest.raises(VtensorsError, match="made for sm_90a; sm_121 needs sm_121a or sm_120f"):
        plan_kernels(request(capability=(12, 1)), kernels, rules("nvfp4:*_hopper", kernels))
    both = rules("nvfp4:*_hopper,nvfp4:*_decode", kernels)
    assert chosen(plan_kernels(request(capability=(12, 1)), kernels, both)) == {
        (1, 32): "linear_nvfp4_decode",
        (33, None): "linear_nvfp4_fast",
    }


def test_nothing_stands_in_for_a_forced_kernel_that_failed() -> None:
    kernels = [*KERNELS, kernel("linear_nvfp4_prefill", cost=7.0, tokens=(33, None))]
    plan = plan_kernels(request(), kernels, rules("nvfp4:*_decode,nvfp4:*_prefill", kernels))
    with pytest.raises(VtensorsError, match=r"linear_nvfp4_decode: failed its self-test") as caught:
        replan(plan, {"linear_nvfp4_decode": "failed its self-test"})
    assert "linear_nvfp4_fast: VT_KERNELS asks for nvfp4:*_decode" in str(caught.value)
    assert "linear_nvfp4_prefill: serves M >= 33, not M = 1..32" in str(caught.value)


def test_a_scheme_that_is_spelt_out_is_forced_and_one_that_a_glob_meets_is_not() -> None:
    with pytest.raises(VtensorsError, match="linear_nvfp4_fast: computes nvfp4, not bf16"):
        plan_kernels(request(scheme="bf16"), KERNELS, rules("bf16:linear_nvfp4_fast"))
    plan = plan_kernels(request(scheme="bf16"), KERNELS, rules("*:linear_nvfp4_fast"))
    assert chosen(plan) == {(1, None): "linear_reference"}


def test_a_kernel_is_forbidden_for_the_scheme_of_the_rule_only() -> None:
    forbidden = rules("fp8-row:!linear_reference")
    assert "linear_reference" not in dict(plan_kernels(request(), KERNELS, forbidden).rejected)
    assert "linear_reference" in dict(plan_kernels(request(scheme="fp8-row"), KERNELS, forbidden).rejected)


def test_a_rule_for_one_op_leaves_another_op_alone() -> None:
    forced = rules("nvfp4:embedding_nvfp4")
    assert chosen(plan_kernels(request(), KERNELS, forced)) == {(1, None): "linear_nvfp4_fast"}
    assert chosen(plan_kernels(request("embedding"), KERNELS, forced)) == {(1, None): "embedding_nvfp4"}


def test_forcing_a_plain_linear_takes_fused_ops_apart() -> None:
    kernels = [*KERNELS, kernel("linears_nvfp4", op="linears", cost=0.5)]
    assert chosen(plan_kernels(request("linears"), kernels, decompose=DECOMPOSE)) == {
        (1, None): "linears_nvfp4"
    }
    plan = plan_kernels(request("linears"), kernels, rules("nvfp4:*_slow", kernels), decompose=DECOMPOSE)
    assert plan.decomposed
    assert [chosen(part) for part in plan.parts] == [{(1, None): "linear_nvfp4_slow"}] * 2
    assert ("linears_nvfp4", "VT_KERNELS asks for nvfp4:*_slow") in plan.rejected


def test_forcing_a_plain_linear_for_few_rows_takes_fused_ops_apart_too() -> None:
    kernels = [*KERNELS, kernel("linears_nvfp4", op="linears", cost=0.5)]
    plan = plan_kernels(request("linears"), kernels, rules("nvfp4:*_decode", kernels), decompose=DECOMPOSE)
    assert plan.decomposed
    assert chosen(plan.parts[0])[1, 32] == "linear_nvfp4_decode"


def test_a_forbidding_rule_at_fault_is_named_first_and_one_that_is_not_is_not_named() -> None:
    with pytest.raises(VtensorsError) as caught:
        plan_kernels(request(), KERNELS[:3], rules("nvfp4:!linear_*"))
    assert str(caught.value).startswith("under VT_KERNELS=nvfp4:!linear_* no kernel computes 'linear'")
    with pytest.raises(VtensorsError) as caught:
        plan_kernels(request(), KERNELS[2:3], rules("nvfp4:*_decode"))
    assert str(caught.value).startswith("no kernel computes 'linear'")
    assert "VT_KERNELS" not in str(caught.value)


def test_a_kernel_that_the_user_did_not_ask_for_says_so_before_the_rows_it_serves() -> None:
    plan = plan_kernels(request(), KERNELS, rules("nvfp4:*_slow"))
    assert dict(plan.rejected)["linear_nvfp4_decode"] == "VT_KERNELS asks for nvfp4:*_slow"


def test_of_many_names_the_nearest_few_are_shown_and_how_to_list_all() -> None:
    many = [kernel(f"linear_nvfp4_form_{index}") for index in range(40)] + [
        kernel("embedding_far", op="embedding")
    ]
    with pytest.raises(SwitchError) as caught:
        rules("nvfp4:linear_nvfp4_form_x", many)
    assert caught.value.accepted is not None
    assert caught.value.accepted.count("linear_nvfp4_form_") == 5
    assert caught.value.accepted.endswith(", ... (the nearest of 41)")
    assert "`vtensors kernels` lists every kernel" in str(caught.value)
    with pytest.raises(SwitchError) as caught:
        rules("nvfp4:zzz", many)
    assert "did you mean" not in str(caught.value)


def test_the_example_of_the_switchs_summary_is_accepted_with_the_built_in_kernels() -> None:
    (summary,) = [switch.summary for switch in vtensors_switches() if switch.name == "VT_KERNELS"]
    example = summary.split("`")[7]
    registry = Plugins.discover(third_parties=[], environ={}).registry
    kernels = [owned.record for owned in registry.kernels.values()]
    assert len(KernelRules.parse(example, kernels, registry.schemes).rules) == 2


def test_rules_that_did_nothing_are_told_each_once() -> None:
    asked = [("linear", "nvfp4"), ("linear", "nvfp4"), ("linear", "bf16")]
    found = rules("nvfp4:*_fast,fp8-*:!linear_fp8_fast,nvfp4:embedding*,*:linear_nvfp4_slow")
    assert found.notes(asked, KERNELS) == (
        "VT_KERNELS: 'fp8-*:!linear_fp8_fast' matches no scheme of this model",
        "VT_KERNELS: 'nvfp4:embedding*' matches no kernel of an op of this model",
        "VT_KERNELS: '*:linear_nvfp4_slow' has no kernel for bf16 weights; others are used",
    )


def test_only_rules_for_schemes_of_the_model_that_ask_for_a_kernel_are_in_vain() -> None:
    asked = [("linear", "nvfp4"), ("linear", "bf16")]
    found = rules("fp8-row:linear_fp8_fast,nvfp4:!embedding*,nvfp4:embedding*,*:linear_nvfp4_slow")
    assert len(found.notes(asked, KERNELS)) == 4
    assert found.in_vain(asked, KERNELS) == found.notes(asked, KERNELS)[2:]
