"""What a message advises is there where the message is printed: options of the command, arguments of the calls."""

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

from mcore_ckpt.cli.main import build_parser, command_module

PACKAGE = Path(__file__).parent.parent / "mcore_ckpt"
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]+")
ARGUMENT = re.compile(r"(?<![\w.`?&/-])([a-z_]{3,})=(?![=\d])")
NAMED = re.compile(r"mcore-ckpt ([a-z]+)|^(?:convert|test|bench) |\bmerge without $")

# Whose messages a command imports, but does not print.
ELSEWHERE = {
    "mcore_ckpt.tools.examine.find": ("merge", "test"),  # which alone call `find_checkpoint` and `config_dir`
    "mcore_ckpt.tools.examine.select": ("inspect", "merge", "test"),  # it names --step only to who has given it
    "mcore_ckpt.steps.new_folder": ("merge", "convert", "reshard", "collect"),
    "mcore_ckpt.steps.new_step": ("convert", "reshard", "collect"),  # which alone write roles of a step
    # `MergeRequest.adapters` comes from merge alone, and merge_adapters writes beside only if it is given.
    "mcore_ckpt.tools.convert.merge": ("merge",),
    "mcore_ckpt.tools.convert.merge_adapters": ("merge",),
    # --hf_model_path of the command that the message names before.
    "mcore_ckpt.tools.examine.what_is": ("merge", "convert", "test"),
    # bench asks for layouts that it chooses itself.
    "mcore_ckpt.tools.convert.reshard.target": ("reshard", "convert"),
    "mcore_ckpt.tools.convert.reshard.planner": ("reshard",),  # which alone cuts a vocabulary
    "mcore_ckpt.cli.arguments": ("convert", "merge"),
    "mcore_ckpt.models.accounting": ("merge", "convert"),  # which report what they have left out
    "mcore_ckpt.cli.list_command": ("list",),
    "mcore_ckpt.steps.space_watch": ("prune",),  # whose name is the value before the option
}
# Options of other programs.
FOREIGN_MODULES = ("mcore_ckpt.integrations.", "mcore_ckpt.formats.huggingface.hub")
# Arguments of megatron, torch and transformers, and options of file systems, as the messages say.
FOREIGN = {
    *("data", "local_lock", "lookupcache", "mmap", "release", "resolve", "module_name", "weights_only"),
    *("mla_down_proj_fusion", "share_embeddings_and_output_weights", "share_expert_adapters"),
    *("use_distributed_optimizer", "use_grouped_gemm_for_dense_mlp", "use_grouped_gemm_for_shared_expert"),
    *("load_optim", "non_persistent_ckpt", "rng_state_key_prefix", "skip_load_to_model_and_opt", "alpha", "vpp"),
}
PUBLIC = (
    *("mcore_ckpt", "mcore_ckpt.preemption", "mcore_ckpt.recover", "mcore_ckpt.schedule"),
    "mcore_ckpt.integrations.megatron",
    "mcore_ckpt.tools.convert.merge",
    *("mcore_ckpt.formats.huggingface.export_plan", "mcore_ckpt.config"),
)


def messages() -> Iterator[tuple[str, str]]:
    """The strings of each module with more than one word, without docstrings. A value in them is a `\\0`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        tree = ast.parse(path.read_text())
        skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.JoinedStr):
                skipped |= {id(part) for part in node.values}
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
                text = node.value
            if " " in text:
                yield name, text


@cache
def module_of(name: str) -> Path | None:
    base = PACKAGE.parent / name.replace(".", "/")
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def parsed(name: str) -> ast.Module:
    path = module_of(name)
    assert path is not None
    return ast.parse(path.read_text())


@cache
def lazily(package: str) -> dict[str, str]:
    """The module of each public name that a room gives out on first use."""
    for node in ast.walk(parsed(package)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "lazy_names":
            found = ast.literal_eval(node.args[1])
            return {name: f"{package}.{module}" for module, names in found.items() for name in names}
    return {}


@cache
def imports(name: str) -> frozenset[str]:
    """The modules of the package that a module imports when it runs."""
    found, nodes = set(), list(parsed(name).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        if isinstance(node, ast.ImportFrom) and node.module and module_of(node.module):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if module_of(inner) else lazily(node.module).get(alias.name, node.module))
    return frozenset(found)


def reachable(name: str) -> set[str]:
    seen, waiting = set[str](), [name]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += imports(module)
    return seen


@cache
def commands() -> dict[str, tuple[set[str], set[str]]]:
    """Of each command its options, and the modules whose messages it can print."""
    [subparsers] = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return {
        name: (
            {text for action in parser._actions for text in action.option_strings},
            reachable(command_module(name).__name__),
        )
        for name, parser in subparsers.choices.items()
        if name != "completion"  # which has the others' parsers
    }


def commands_of(module: str, before: str) -> set[str]:
    """The commands that an option is for: the last that the text before it names, or those that can print the text."""
    named = [match[1] or match[0].split()[0] for match in NAMED.finditer(before)]
    able = {name for name, (_, modules) in commands().items() if module in modules}
    return set(named[-1:]) or able & set(ELSEWHERE.get(module, able))


def test_each_option_that_a_message_names_exists_where_it_is_printed() -> None:
    wrong, looked_at = [], 0
    for module, text in messages():
        for option in OPTION.finditer(text) if not module.startswith(FOREIGN_MODULES) else ():
            for command in commands_of(module, text[: option.start()]):
                looked_at += 1
                if option[0] not in commands()[command][0]:
                    wrong.append(f"{module}: {command} has no {option[0]}: {text!r}")
    assert not wrong, "\n".join(wrong)
    assert looked_at > 150


def parameters_of(call: object) -> set[str]:
    return set(inspect.signature(call).parameters) if inspect.isfunction(call) else set()


def parameters() -> set[str]:
    """The names of the parameters and fields of what the package exports."""
    found = set()
    for module in map(import_module, PUBLIC):
        for name in getattr(module, "__all__", dir(module)):
            value = getattr(module, name)
            if inspect.isclass(value):
                found |= {parameter for call in vars(value).values() for parameter in parameters_of(call)}
            found |= parameters_of(value)
    return found


def test_each_argument_that_a_message_names_exists() -> None:
    known = parameters()
    assert {"skip_frozen", "load_contents", "hf_config", "durable_every"} <= known
    named = {name for _, text in messages() for name in ARGUMENT.findall(text)}
    assert sorted(named - known - FOREIGN) == []
    assert named >= FOREIGN, "no message names these any more"
