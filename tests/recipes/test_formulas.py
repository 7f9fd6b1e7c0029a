import pytest

from dcp_pipeline.config.formulas import evaluate, evaluate_all

DIMS = {"heads": 32, "kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        (7, 7),
        ("7", 7),
        ("heads", 32),
        ("heads // kv_heads", 4),
        ("(heads + 2 * kv_heads) * head_dim", 6144),
        ("heads - kv_heads - 1", 23),
        (" 2*head_dim ", 256),
    ],
)
def test_value(formula: int | str, value: int) -> None:
    assert evaluate(formula, DIMS) == value


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("head", "found the name 'head'; known: heads, kv_heads, head_dim; did you mean 'heads'?"),
        ("heads ** 9", r"found 'heads \*\* 9'; a formula has names"),
        ("heads / 2", "found 'heads / 2'"),
        ("-heads", "found '-heads'"),
        ("heads.real", "found 'heads.real'"),
        ("__import__('os')", "found \"__import__\\('os'\\)\""),
        ("heads if heads else 1", "found 'heads if heads else 1'"),
        ("1.5", "found '1.5'"),
        ("True", "found 'True'"),
        ("heads +", "'heads \\+' is no formula"),
        ("", "'' is no formula"),
        ("heads // (kv_heads - 8)", "divides by 0"),
        ("1+" * 150 + "1", "a formula of 301 characters; at most 200"),
    ],
)
def test_refused(formula: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(formula, DIMS)


def test_one_after_another() -> None:
    assert evaluate_all({"a": 2, "b": "a + 1", "c": "a * b"}) == {"a": 2, "b": 3, "c": 6}
    with pytest.raises(ValueError, match="b: found the name 'c'; known: a"):
        evaluate_all({"a": 2, "b": "c", "c": 3})
