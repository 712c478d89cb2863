"""Many checkpoints under one root: commit, listing, tracker, retention, pins, locks, and copies in a remote store.

Public names, for integrations and commands:

- which steps there are: `StepStatus`, `list_steps`, `complete_steps`, `newest_complete`, `step_status`,
  `holds_something`, `find_moved_aside`, and whether a step may be replaced: `check_own_step`;
- how large a step is: `StepSize`, `size_of`;
- their order: `oldest_first`;
- the files of a checkpoint on a node of the fast tier: `NodeFiles`, `files_of_node`, and a step on all nodes together:
  `NodeStep`;
- the file that names the newest step: `read_tracker`, `write_tracker`, `move_tracker`, `remove_tracker`;
- which steps stay: `PreservationPolicy`, `delete_old_steps`, `rules_of_others`, `delete_step`, `discard_step`, `pin`,
  `unpin`,
  and by which metrics: `set_metrics`, `metrics_of`;
- a role of plain files, such as a data position: `commit_role` with `RoleWriter`, `RoleReader`,
  `uncommit_earlier_save`, `uncommit_role`, `roles_begun`, and `seal_role` for files that another program has written;
- from which checkpoint a training goes on: `RunHistory`;
- locks: `TrainerLock` lets only one trainer at a time save a role, and `reading` prevents the deletion of steps while
  they are read;
- files and folders of a trainer that a load restores: `replace_entry`, `remove_entry`;
- saves that have not committed: `RunningSave`, `running_saves`;
- leftovers of crashed processes: `remove_leftovers`, `remove_sibling_leftovers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_ckpt.public_names import lazy_names

if TYPE_CHECKING:
    from mcore_ckpt.steps.choice import oldest_first
    from mcore_ckpt.steps.history import RunHistory
    from mcore_ckpt.steps.later_metrics import metrics_of, set_metrics
    from mcore_ckpt.steps.leftovers import remove_leftovers, remove_sibling_leftovers
    from mcore_ckpt.steps.listing import (
        StepStatus,
        check_own_step,
        complete_steps,
        find_moved_aside,
        holds_something,
        list_steps,
        newest_complete,
        read_tracker,
        step_status,
    )
    from mcore_ckpt.steps.new_folder import remove_entry, replace_entry
    from mcore_ckpt.steps.node_files import NodeFiles, files_of_node
    from mcore_ckpt.steps.node_steps import NodeStep
    from mcore_ckpt.steps.pins import pin, unpin
    from mcore_ckpt.steps.read_lock import reading
    from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps, delete_step, discard_step
    from mcore_ckpt.steps.role_files import (
        RoleReader,
        RoleWriter,
        commit_role,
        roles_begun,
        seal_role,
        uncommit_earlier_save,
        uncommit_role,
    )
    from mcore_ckpt.steps.role_rules import rules_of_others
    from mcore_ckpt.steps.staged_saves import RunningSave, running_saves
    from mcore_ckpt.steps.step_sizes import StepSize, size_of
    from mcore_ckpt.steps.tracker import move_tracker, remove_tracker, write_tracker
    from mcore_ckpt.steps.trainer_lock import TrainerLock

__all__ = [
    "NodeFiles",
    "NodeStep",
    "PreservationPolicy",
    "RoleReader",
    "RoleWriter",
    "RunHistory",
    "RunningSave",
    "StepSize",
    "StepStatus",
    "TrainerLock",
    "check_own_step",
    "commit_role",
    "complete_steps",
    "delete_old_steps",
    "delete_step",
    "discard_step",
    "files_of_node",
    "find_moved_aside",
    "holds_something",
    "list_steps",
    "metrics_of",
    "move_tracker",
    "newest_complete",
    "oldest_first",
    "pin",
    "read_tracker",
    "reading",
    "remove_entry",
    "remove_leftovers",
    "remove_sibling_leftovers",
    "remove_tracker",
    "replace_entry",
    "roles_begun",
    "rules_of_others",
    "running_saves",
    "seal_role",
    "set_metrics",
    "size_of",
    "step_status",
    "uncommit_earlier_save",
    "uncommit_role",
    "unpin",
    "write_tracker",
]

__getattr__ = lazy_names(
    __name__,
    {
        "choice": ("oldest_first",),
        "history": ("RunHistory",),
        "leftovers": ("remove_leftovers", "remove_sibling_leftovers"),
        "later_metrics": ("metrics_of", "set_metrics"),
        "listing": (
            "StepStatus",
            "check_own_step",
            "complete_steps",
            "find_moved_aside",
            "holds_something",
            "list_steps",
            "newest_complete",
            "read_tracker",
            "step_status",
        ),
        "new_folder": ("remove_entry", "replace_entry"),
        "node_files": ("NodeFiles", "files_of_node"),
        "node_steps": ("NodeStep",),
        "pins": ("pin", "unpin"),
        "read_lock": ("reading",),
        "retention": ("PreservationPolicy", "delete_old_steps", "delete_step", "discard_step"),
        "role_files": (
            "RoleReader",
            "RoleWriter",
            "commit_role",
            "roles_begun",
            "seal_role",
            "uncommit_earlier_save",
            "uncommit_role",
        ),
        "role_rules": ("rules_of_others",),
        "staged_saves": ("RunningSave", "running_saves"),
        "step_sizes": ("StepSize", "size_of"),
        "tracker": ("move_tracker", "remove_tracker", "write_tracker"),
        "trainer_lock": ("TrainerLock",),
    },
)
