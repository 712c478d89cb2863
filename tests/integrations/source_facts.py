"""What a framework's sources say about what our integration overrides, calls or is called by, without importing them.

`facts/NAME.json` says which functions, texts and classes those are, and what stands there in a certain version. This
program records them anew, from a checkout or an unpacked wheel:

    python tests/integrations/source_facts.py slime ~/slime
"""

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parent / "facts"


@dataclass(frozen=True)
class Facts:
    """What is recorded of a framework.

    Attributes:
        name: of the framework, and of the file.
        version: `commit` and `date` of a checkout, or the `version` of a wheel.
        functions: `path:qualname` with its `signature`, without types, and the functions in `callers` that it is
            `called_by`: those that call a function, or a method, of this name.
        callers: the files in which calls are looked for.
        texts: file and texts that stand in it: names of files, and attributes that are read.
        classes: folder and the classes in it, as `module:name`, whose names end with one of `endings`.
    """

    name: str
    version: dict[str, str]
    functions: dict[str, dict[str, Any]]
    callers: list[str]
    texts: dict[str, list[str]]
    classes: dict[str, Any]

    @staticmethod
    def of(name: str) -> "Facts":
        return Facts(name, **json.loads((FACTS / f"{name}.json").read_text()))

    def signature(self, name: str) -> str:
        return self.functions[name]["signature"]

    def read_again(self, source: Path) -> "Facts":
        """The same of other sources. A text that is gone is left out; a file or a function that is gone is an error."""
        calls = dict(_calls(source, self.callers))
        functions = {}
        for name in self.functions:
            path, qualname = name.split(":")
            called = qualname.split(".")[-1]
            key = (called, "." in qualname)
            # An `__init__` is called by the name of its class.
            by = [] if called[:2] == "__" else sorted(caller for caller, names in calls.items() if key in names)
            functions[name] = {"signature": signature_in((source / path).read_text(), qualname), "called_by": by}
        found = {path: (source / path).read_text() for path in self.texts}
        texts = {path: [text for text in each if text in found[path]] for path, each in self.texts.items()}
        classes = self.classes and {**self.classes, "names": _classes(source, **_without_names(self.classes))}
        return Facts(self.name, _version(source), functions, self.callers, texts, classes)

    def write(self) -> None:
        content = {key: value for key, value in vars(self).items() if key != "name"}
        (FACTS / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n")


def signature_in(source: str, qualname: str) -> str:
    """The parameters of a function or method, as they stand in the source, without types."""
    functions = dict(_functions(ast.parse(source).body))
    if qualname not in functions:
        raise LookupError(f"{qualname} is gone")
    found: Any = functions[qualname]
    for argument in ast.walk(found.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(found.args)})"


def signature_of(function: Callable[..., Any]) -> str:
    """The same of a function of ours."""
    signature = inspect.signature(function)
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)).replace(" = ", "=")


def _calls(source: Path, paths: list[str]) -> Iterator[tuple[str, set[tuple[str, bool]]]]:
    """The functions in files, and the names of what each of them calls, with whether it is called as a method."""
    for path in paths:
        for qualname, node in _functions(ast.parse((source / path).read_text()).body):
            called = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
            names = {(each.id, False) for each in called if isinstance(each, ast.Name)}
            names |= {(each.attr, True) for each in called if isinstance(each, ast.Attribute)}
            yield f"{path}:{qualname}", names


def _functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")


def _classes(source: Path, folder: str, root: str, endings: list[str]) -> list[str]:
    found = []
    for path in sorted((source / folder).rglob("*.py")):
        module = ".".join(path.relative_to(source / root).with_suffix("").parts)
        names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        found += [f"{module}:{name}" for name in names if name.endswith(tuple(endings))]
    return found


def _without_names(classes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in classes.items() if key != "names"}


def _version(source: Path) -> dict[str, str]:
    if not (source / ".git").exists():
        (metadata,) = source.glob("*.dist-info/METADATA")
        line = next(line for line in metadata.read_text().splitlines() if line.startswith("Version: "))
        return {"version": line.removeprefix("Version: ")}
    command = ["git", "-C", str(source), "show", "-s", "--format=%H %cs", "HEAD"]
    commit, date = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return {"commit": commit, "date": date}


if __name__ == "__main__":
    Facts.of(sys.argv[1]).read_again(Path(sys.argv[2]).expanduser()).write()
