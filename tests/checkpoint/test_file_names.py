"""Names on disk."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.checkpoint import file_names

ranks = st.integers(0, 2000)
attempts = st.text("0123456789abcdef", min_size=1, max_size=32)
roles = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,9}", fullmatch=True)
steps = st.integers(0, 10**15)


def test_every_name_is_the_one_in_the_format() -> None:
    assert file_names.step_dir(Path("r"), 120) == Path("r/global_steps_120")
    assert file_names.model_file(tp=3, pp=12) == "model/mp_rank_03_012/model_states.pt"
    assert file_names.expert_file(etp=1, pp=0, ep=7) == "model/mp_rank_01_000_007/model_states.pt"
    assert file_names.optimizer_file(pp=1, tp=2, cp=3, dp=4) == "optim/distrib_optim_pp1_tp2_cp3_dp4.pt"
    assert file_names.rng_file(pp=1, tp=2, cp=3, dp=4) == "rng_states/rng_states_pp1_tp2_cp3_dp4.pt"
    assert file_names.extra_file(pp=1, tp=2, cp=3, dp=4) == "extra_state/extra_state_pp1_tp2_cp3_dp4.pt"
    assert (file_names.TRACKER_FILE, file_names.MANIFEST_FILE, file_names.COMMON_FILE, file_names.HUGGINGFACE_DIR) == (
        "latest_checkpointed_iteration.txt",
        "manifest.json",
        "optim/common.pt",
        "huggingface",
    )


@pytest.mark.parametrize(
    "name", [file_names.model_file, file_names.expert_file, file_names.optimizer_file, file_names.rng_file]
)
@given(data=st.data())
def test_no_two_ranks_share_a_file(name, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    places = st.tuples(*[ranks] * (name.__code__.co_argcount))
    first, second = data.draw(places), data.draw(places)
    assert (name(*first) == name(*second)) == (first == second)


@given(tp=ranks, pp=ranks, ep=ranks)
def test_a_dense_file_is_never_an_experts_file(tp: int, pp: int, ep: int) -> None:
    assert file_names.model_file(tp, pp).count("_") + 1 == file_names.expert_file(tp, pp, ep).count("_")


def test_no_name_is_longer_than_file_systems_take() -> None:
    longest = Path("root") / "global_steps_4611686018427387903" / file_names.check_role("a" * 128)
    attempt = "f" * 32
    under_way = f".{file_names.trainer_file(Path(), longest.name).name}.{attempt}"  # storage.files.replace_file
    assert file_names.is_under_way(under_way, file_names.trainer_file(Path(), longest.name))
    names = [file_names.staging_dir(longest, attempt).name, file_names.replaced_dir(longest, attempt).name, under_way]
    names.append(file_names.deleted_dir(longest.parent, attempt).name)
    assert max(map(len, names)) <= 255
    with pytest.raises(ValueError, match="129 characters"):
        file_names.check_role("a" * 129)


@given(steps, roles, attempts)
def test_formatted_names_are_parsed(step: int, role: str, attempt: str) -> None:
    step_path = file_names.step_dir(Path("root"), step)
    assert file_names.parse_step(step_path.name) == step
    role_dir = step_path / file_names.check_role(role)
    staging, replaced = file_names.staging_dir(role_dir, attempt), file_names.replaced_dir(role_dir, attempt)
    assert staging.parent == replaced.parent == step_path
    assert file_names.parse_work_dir(staging.name) == file_names.RoleWorkDir(role, "staging", attempt)
    assert file_names.parse_work_dir(replaced.name) == file_names.RoleWorkDir(role, "replaced", attempt)
    deleted = file_names.deleted_dir(step_path, attempt)
    assert deleted.parent == step_path.parent
    assert file_names.is_deleted_dir(deleted.name)
    for name in (staging.name, replaced.name, deleted.name):
        assert not file_names.is_role(name)
        assert file_names.parse_step(name) is None


@pytest.mark.parametrize(
    "role",
    [
        *("", ".", "..", "../actor", "/actor", "actor/", "a/b", "a\\b", ".actor", "-actor", "_actor", "actor\n"),
        *("ac tor", "actor\0", "akteür", "actor.staging-1", "\u0661", "a" + "\u2024" + "b", "~", "$HOME"),
    ],
)
def test_a_role_that_is_more_than_a_folder_name_is_refused(role: str) -> None:
    assert not file_names.is_role(role)
    with pytest.raises(ValueError, match="is not a folder name"):
        file_names.check_role(role)


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        (("actor", "../critic"), "role '../critic' is not a folder name"),
        (("actor", "Actor"), "differ only in upper and lower case"),
        (("a" * 255,), "has 255 characters: use at most 128"),
    ],
)
def test_roles_of_a_step_that_cannot_be_folders_are_refused_by_name(roles: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        file_names.check_roles(roles)


@given(st.text(max_size=12))
def test_any_role_that_passes_stays_inside_its_folder(role: str) -> None:
    if file_names.is_role(role):
        assert role.isascii()
        assert (Path("/root") / role).resolve().parent == Path("/root")
        assert not role.startswith(".")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *(("global_steps_0", 0), ("global_step_7", 7), ("global_steps_10", 10)),
        *((name, None) for name in ("global_steps_", "global_steps_007", "global_steps_-1", "global_steps_1x")),
        *(
            (name, None)
            for name in ("global_stepss_1", "global_steps1", "global_steps_1\n", "global_steps_\u0661", "x")
        ),
        *((name, None) for name in ("global_steps_1.tmp", ".global_steps_1", "global_steps_1e3", "iter_0000001")),
    ],
)
def test_step_folders(name: str, step: int | None) -> None:
    assert file_names.parse_step(name) == step


@pytest.mark.parametrize(
    ("text", "step"),
    [
        *(("120", 120), ("120\n", 120), ("  120 \r\n", 120), ("0", 0), ("007", 7)),
        *(
            (text, None)
            for text in ("", "\n", "release", "12x", "-1", "1.0", "1 2", "1_000", "\0\0\0", "9" * 19, "\u0663")
        ),
    ],
)
def test_a_tracker_is_a_step_or_nothing(text: str, step: int | None) -> None:
    assert file_names.parse_tracker(text) == step


@given(steps)
def test_a_tracker_round_trips(step: int) -> None:
    assert file_names.parse_tracker(str(step)) == step


def test_both_spellings_are_found_and_ours_comes_first(tmp_path: Path) -> None:
    for name in ("global_step_5", "global_steps_5", "global_step_40", "global_steps_7", ".deleted-global_steps_9-a"):
        (tmp_path / name).mkdir()
    (tmp_path / "global_steps_6").write_text("a file")
    found = file_names.step_dirs(tmp_path)
    assert {step: [path.name for path in paths] for step, paths in found.items()} == {
        5: ["global_steps_5", "global_step_5"],
        7: ["global_steps_7"],
        40: ["global_step_40"],
    }
    assert file_names.step_dirs(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    "name",
    ["actor", ".actor", ".actor.staging-", ".actor.staging-xyz", ".actor.other-1", ".a/b.staging-1", "..staging-1"],
)
def test_other_hidden_folders_are_left_alone(name: str) -> None:
    assert file_names.parse_work_dir(name) is None
    assert not file_names.is_deleted_dir(name)


@pytest.mark.parametrize(
    ("folder", "root"),
    [
        ("/r/global_steps_5/actor", "/r"),
        ("/r/global_step_5/actor", "/r"),
        ("/r/checkpoint-5/actor", "/r"),
        ("/r/global_step_5", "/r"),
        ("/r/checkpoint-5", "/r"),
        ("/r/global_step_5/critic", None),
        ("/r/anything", None),
        ("/r/global_step_5/actor/deeper", None),
        ("/global_step_3/global_step_5", "/global_step_3"),
    ],
)
def test_which_folders_are_part_of_a_step(folder: str, root: str | None) -> None:
    assert file_names.step_root(Path(folder), "actor", 5) == (None if root is None else Path(root))


@pytest.mark.parametrize("folder", ["/r/global_step_6/actor", "/r/checkpoint-6", "/r/global_steps_6/critic"])
def test_a_folder_of_another_step_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="is a folder of step 6, not of step 5"):
        file_names.step_root(Path(folder), "actor", 5)


@pytest.mark.parametrize("role", ["global_step_1", "global_steps_20", "checkpoint-3"])
def test_a_role_cannot_be_named_like_a_step(role: str) -> None:
    assert not file_names.is_role(role)
    with pytest.raises(ValueError, match="is the name of a step's folder"):
        file_names.check_role(role)
