"""Blocks of Markdown: they run, what they say is compared, and a block that is wrong fails where it stands."""

from __future__ import annotations

import pytest

import documents

PAGE = """
<!-- setup
x = 3
-->
```python
y = x + 1
```
Some words.
```bash
exit 1
```

=== "In a tab"

    ```python
    if y == {}:
        print("four:", y)
    ```

    ```text
    four: {}
    ```
"""


def test_blocks_share_a_namespace_and_setup_is_run_but_not_counted() -> None:
    assert documents.run(PAGE.format(4, 4), "page.md") == 2


def test_a_wrong_block_fails_and_shows_its_line() -> None:
    with pytest.raises(NameError) as caught:
        documents.run(PAGE.format("unknown", 4), "page.md")
    assert caught.traceback[-1].lineno + 1 == 16


@pytest.mark.parametrize(("shown", "says"), [(4, 5), (5, 4)])
def test_what_a_block_prints_is_compared(shown: int, says: int) -> None:
    with pytest.raises(AssertionError, match=r"page.md, line 15: the block says"):
        documents.run(PAGE.format(shown, says), "page.md")


@pytest.mark.parametrize(
    ("code", "says", "is_right"),
    [
        ("int('x')", "ValueError: invalid literal ... 'x'", True),
        ("int('x')", "ValueError: invalid literal for int()", False),
        ("int('x')", "TypeError: invalid literal ... 'x'", False),
        ("int('3')", "ValueError: invalid literal ... 'x'", False),
        ("import warnings; warnings.warn('careful')", "UserWarning: careful", True),
        ("import warnings; warnings.warn('careful')", "UserWarning: look out", False),
        ("pass", "UserWarning: careful", False),
        ("print('a  b\\nc')", "a b c", True),
        ("print('a.b')", "a-b", False),
    ],
)
def test_errors_warnings_and_output(code: str, says: str, is_right: bool) -> None:
    page = f"```python\n{code}\n```\n\n```text\n{says}\n```\n"
    if is_right:
        assert documents.run(page, "page.md") == 1
    else:
        with pytest.raises(AssertionError, match="and not"):
            documents.run(page, "page.md")


def test_an_error_that_is_not_announced_is_raised() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        documents.run("```python\nint('x')\n```\n\n```text\nfour\n```\n", "page.md")


def test_lines_that_tell_of_the_machine_are_not_compared() -> None:
    page = "```python\nprint('cpu  {}')\nprint('plan  on')\n```\n\n<!-- machine: cpu -->\n```text\ncpu  A\nplan  on\n```\n"
    assert documents.run(page.format("A"), "page.md") == documents.run(page.format("B"), "page.md") == 1
    with pytest.raises(AssertionError):
        documents.run(page.format("A").replace("'plan  on'", "'plan  off'"), "page.md")
