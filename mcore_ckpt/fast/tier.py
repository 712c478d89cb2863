"""Defines this rank's part of the fast tier: the job's nodes, this node's folder, and the ways to other nodes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.provenance import Run
from mcore_ckpt.config import FastTier
from mcore_ckpt.errors import CommitError, InvalidArgumentError, NoRoomError
from mcore_ckpt.fast.job_secret import SecretOffer, given_secret, same_secrets
from mcore_ckpt.fast.peer_tls import PeerTls, read_tls
from mcore_ckpt.fast.tcp_transport import TcpTransport
from mcore_ckpt.fast.transport import Peer, Server, Transport
from mcore_ckpt.io import limits
from mcore_ckpt.io.access import check_own_folder, strange, top_mode
from mcore_ckpt.io.files import make_folder
from mcore_ckpt.io.folder_sizes import sizes_below
from mcore_ckpt.io.node_memory import bytes_free, is_memory
from mcore_ckpt.ranks import deadlines
from mcore_ckpt.ranks.addresses import own_address
from mcore_ckpt.ranks.hosts import this_host
from mcore_ckpt.ranks.node_map import Node, NodeMap
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, same_everywhere
from mcore_ckpt.steps.node_steps import FastCheckpoint, HeldRole, held_roles
from mcore_ckpt.steps.runs import Ownership, RootRun, elsewhere, whose
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.steps.transaction import Attempt

logger = logging.getLogger(__name__)

_TOPIC = "setting up the fast tier"
# Each node except node 0 gets the manifest of a save from another node, and serves the manifest to at most this many
# further nodes. If one node served all nodes, a thousand nodes would wait for that node's network. In a chain, the
# nodes would wait for each other.
_BRANCHES = 8


@dataclass(frozen=True)
class _Own:
    """The user's secret and certificates for the connections between nodes, as given on this rank."""

    secret: bytes | None
    tls: PeerTls | None


@dataclass(eq=False)
class NodeTier:
    """This rank's part of the fast tier of one role.

    Attributes:
        number: the number of this node among all nodes.
        folder: this node's folder, which has the layout of a root.
        transport: how the nodes read each other's folders.
        server: this node's server, on the node's lead; None on the node's other ranks.
        lock: the lock on the role in this node's folder. Only the lead uses it.
        root: the root, which says to which run the steps of this training belong.
        shared: whether the group may read and write what is in the folder (`CheckpointConfig.shared_with_group`).
        unrenamed: the committed saves whose folder this node has not renamed yet; empty on all ranks except the lead.
    """

    config: FastTier
    role: str
    nodes: NodeMap
    number: int
    rank: int
    folder: Path
    transport: Transport
    server: Server | None
    lock: TrainerLock
    root: Path | None = None
    shared: bool | None = None
    unrenamed: list[Attempt] = field(default_factory=list)
    _peers: dict[int, Peer] = field(default_factory=dict)
    _published: str | None = None
    _own: Ownership = field(default_factory=Ownership)

    @property
    def is_lead(self) -> bool:
        """True on the node's lead, the rank that does what each node must do only once."""
        return self.server is not None

    @property
    def node(self) -> Node:
        """This node."""
        return self.nodes.all[self.number]

    def writers_of(self, replicas: Sequence[int]) -> Sequence[tuple[int, ...]]:
        """Groups replicas of a file by node. Each group writes into its node's folder (`NodeMap.writers_of`)."""
        return self.nodes.writers_of(replicas, self.config.replicas)

    def role_dir(self, step: int, role: str | None = None) -> Path:
        """Returns the folder of a role's checkpoint in this node's folder. `role` is None for this tier's role."""
        return file_names.step_dir(self.folder, step) / (role or self.role)

    @property
    def home(self) -> Path:
        """The folder with the run's identity: the root or, if no step is durable, a folder in this node's folder."""
        if self.root is None:
            return self.folder
        return file_names.run_home(self.folder, self.root) if self.config.durable_every is None else self.root

    def ownership(self, saved: Run | None = None) -> Ownership:
        """Returns which checkpoints on the nodes belong to this training.

        `saved` is the run of this training, from a manifest. If `saved` is None, this method reads the run from the
        root's file, which only rank 0 is sure to see.
        """
        if self.root is None:
            return Ownership()
        if not self._own.is_of(saved):  # look only once: a thousand nodes ask at each save
            with nullcontext() if saved is None else suppress(OSError):  # `saved` names the run even without this file
                self._own = elsewhere(self.root, self.home)
        return self._own if saved is None or self._own.is_of(saved) else replace(self._own, known=RootRun(saved))

    def of_this_run(self, found: Sequence[FastCheckpoint]) -> list[FastCheckpoint]:
        """Returns the checkpoints that do not belong to another run. Only rank 0 calls this method."""
        own = self.ownership()
        others = {each.head.run.id: each.head.run for each in found if each.head.run and not own.owns(each.head)}
        for run in others.values():
            logger.warning("%s on the nodes: has steps that are left out: each %s", self.folder, whose(run))
        return [each for each in found if own.owns(each.head)]

    def peer(self, number: int) -> Peer:
        """Returns another node, to read from it."""
        if number not in self._peers:
            node = self.nodes.all[number]
            self._peers[number] = self.transport.peer(node.address, node.name)
        return self._peers[number]

    def publish(self, attempt: str, manifest: bytes) -> None:
        """Serves the manifest of a save to other nodes. Only leads call this method."""
        assert self.server is not None
        self.server.publish(attempt, manifest, self._published)
        self._published = attempt

    def receive(self, attempt: str, patience_s: float) -> bytes:
        """Returns the manifest of a save that the lead of node 0 has published, and serves the manifest to other nodes.

        Raises CommitError if the node that should send the manifest does not answer.
        """
        parent = (self.number - 1) // _BRANCHES
        try:
            data = self.peer(parent).note(attempt, limits.MANIFEST_BYTES, patience_s)
        except OSError as error:
            raise CommitError(f"the manifest has not arrived on {self.node.name}: {error}") from error
        self.publish(attempt, data)
        return data

    def open_folder(self) -> None:
        """Makes this node's folder if it is missing. Raises InvalidArgumentError if the folder is another user's."""
        _open_folder(self.folder, self.shared)

    def held(self) -> list[HeldRole]:
        """Returns the roles' checkpoints on this node. Raises InvalidArgumentError if another user owns the folder."""
        if not os.path.lexists(self.folder):
            return []
        check_own_folder(self.folder, self.shared)
        return held_roles(self.folder, partial(strange, shared=self.shared))

    def stop_serving(self) -> None:
        """Closes the server."""
        if self.server is not None:
            self.server.close()

    def close(self) -> None:
        """Closes the server and all connections, and releases the lock."""
        self.stop_serving()
        for peer in self._peers.values():
            peer.close()
        self.lock.release()


def open_tier(agreement: Agreement, fast: FastTier, role: str, root: Path, shared: bool | None = None) -> NodeTier:
    """Finds the nodes of the job, and starts a server on each node. Every rank calls this function.

    `shared` says whether the group may read and write what is in the folder.

    Raises:
        InvalidArgumentError: there are too few nodes or failure domains for the copies; the ranks have different
            configurations; the folder is the root; or another user has made the folder, or can write in it.
        InvalidStateError: this node's address cannot be found.
        CheckpointError: a rank has failed, or is missing.
    """
    folder = Path(fast.folder).expanduser()
    own: list[_Own] = []
    offers: list[SecretOffer] = []

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere([record["fast"] for record in records], "the fast tier", InvalidArgumentError)
        same_secrets(records)
        nodes = NodeMap.of([record["host"] for record in records], [record["domain"] for record in records])
        _check_copies(nodes, fast.replicas)
        seen_by_all = _seen_by_all(fast, folder, root, len(nodes))
        offers.append(SecretOffer.make(own[0].secret, seen_by_all, role, top_mode(shared)))
        # For each rank, send only the short number of its node. Send names once for each node.
        return {
            "nodes": [[node.name, node.domain] for node in nodes.all],
            "of_ranks": [nodes.number_of_host(record["host"]) for record in records],
            "secret": vars(offers[0]),
        }

    def work() -> Record:
        if folder.resolve() == root.resolve():
            # Deleting old steps of the fast tier would also delete steps that should stay in the root.
            raise InvalidArgumentError(
                f"folder of the fast tier is {folder}, which is the root: use another folder, or no fast tier"
            )
        if os.path.lexists(folder):  # check the folder before the secret is written into it
            check_own_folder(folder, shared)
        tls = None if fast.tls is None else Path(fast.tls).expanduser()
        own.append(_Own(given_secret(), None if tls is None else read_tls(tls)))
        host = this_host()
        settings = replace(fast, folder=str(folder), domain=None, tls=None if tls is None else str(tls))
        return {
            "fast": vars(settings),
            "host": host,
            "domain": host if fast.domain is None else str(fast.domain()),
            "secret": "none" if own[0].secret is None else "one",
        }

    found = decide(agreement, _TOPIC, work, combine)
    members: list[list[int]] = [[] for _ in found["nodes"]]
    for rank, number in enumerate(found["of_ranks"]):
        members[number].append(rank)
    nodes = NodeMap(
        tuple(Node(name, domain, tuple(ranks)) for (name, domain), ranks in zip(found["nodes"], members, strict=True))
    )
    number = found["of_ranks"][agreement.rank]
    servers: list[Server] = []
    transports: list[Transport] = []

    def serve() -> Record:
        secret, timeout_s = SecretOffer(**found["secret"]).take(own[0].secret), agreement.timeout_s
        transports.append(TcpTransport(secret, min(timeout_s, deadlines.PEER_TIMEOUT_S), own[0].tls))
        if nodes.all[number].lead != agreement.rank:
            return {}
        _open_folder(folder, shared)
        servers.append(transports[0].serve(folder, own_address()))
        return {"address": servers[0].address}

    try:
        told = decide(
            agreement, _TOPIC, serve, lambda records: {"at": [records[node.lead]["address"] for node in nodes.all]}
        )
    except BaseException:
        for server in servers:
            server.close()
        raise
    finally:
        for offer in offers:  # only rank 0 has an offer
            offer.remove()
    at = [replace(node, address=address) for node, address in zip(nodes.all, told["at"], strict=True)]
    return NodeTier(
        fast,
        role,
        NodeMap(tuple(at)),
        number,
        agreement.rank,
        folder,
        transports[0],
        servers[0] if servers else None,
        TrainerLock(folder, role, top_mode(shared)),
        root,
        shared,
    )


def _open_folder(folder: Path, shared: bool | None) -> None:
    # The folder may be a link. `check_own_folder` refuses a link that another user has made.
    if not os.path.lexists(folder):
        make_folder(folder, top_mode(shared))
    check_own_folder(folder, shared)


def _seen_by_all(fast: FastTier, folder: Path, root: Path, nodes: int) -> Path | None:
    """Returns a folder that all ranks see; None if there may be no such folder."""
    if fast.durable_every is not None:
        return root
    return folder if nodes == 1 else None


def _check_copies(nodes: NodeMap, replicas: int) -> None:
    if replicas >= len(nodes):
        there = ", ".join(node.name for node in nodes.all[:4])
        raise InvalidArgumentError(
            f"replicas of the fast tier is {replicas}, so each file would be on {replicas + 1} nodes, but the job has "
            f"only {len(nodes)} ({there}): use replicas={len(nodes) - 1} or more nodes"
        )
    for number, node in enumerate(nodes.all):
        if len(nodes.preferred(number)) < replicas:
            raise InvalidArgumentError(
                f"replicas of the fast tier is {replicas}, but only {len(nodes.preferred(number))} nodes are outside "
                f"the failure domain {node.domain!r} of {node.name}: use fewer replicas, or smaller domains"
            )


def promise_space(agreement: Agreement, tier: NodeTier, own_bytes: Callable[[], int]) -> None:
    """Raises NoRoomError if a node's folder is too small for its own files and its copies of other nodes' files.

    Every rank calls this function. `own_bytes` estimates how many bytes this rank writes in one save.
    """

    def work() -> Record:
        record: Record = {"own": own_bytes()}
        if tier.is_lead:
            free, held = bytes_free(tier.folder), _held_bytes(tier.folder, tier.role)
            record |= {"free": None if free is None else free + held, "memory": is_memory(tier.folder)}
        return record

    def combine(records: Sequence[Record]) -> Record:
        nodes, replicas = tier.nodes, tier.config.replicas
        own = [sum(records[rank]["own"] for rank in node.ranks) for node in nodes.all]
        copies = [0] * len(nodes)
        for number in range(len(nodes)):
            for other in nodes.preferred(number)[:replicas]:
                copies[other] += own[number]
        # The folder must hold more than `keep` steps. A step is written before an old step is deleted. The last step
        # with complete copies stays until a newer step has all its copies. A step that is being copied stays, too. A
        # durable step stays until it is in the root.
        steps = tier.config.keep + 1 + (2 if replicas else 0) + (tier.config.durable_every is not None)
        for number, node in enumerate(nodes.all):
            lead = records[node.lead]
            need = steps * (own[number] + copies[number])
            if lead["free"] is not None and need > lead["free"]:
                kind = "memory" if lead["memory"] else "disk"
                raise NoRoomError(
                    f"{tier.folder} on {node.name} would have to hold {need} bytes of {kind}, but only {lead['free']} "
                    f"bytes are available: {steps} steps (keep={tier.config.keep}, and what is being saved) of "
                    f"{own[number]} bytes of its ranks and {copies[number]} bytes of copies for other nodes. Use fewer "
                    "steps or replicas, more nodes, or a larger folder"
                )
        return {}

    decide(agreement, _TOPIC, work, combine)


def _held_bytes(folder: Path, role: str) -> int:
    """Returns how many bytes the role's files in the folder have. Later saves will replace or remove these files."""
    return sum(
        size
        for paths in file_names.step_dirs(folder).values()
        for step_path in paths
        for path, size in sizes_below(step_path).items()
        if _role_of(Path(path).parts[0]) == role
    )


def _role_of(name: str) -> str:
    """Returns the role of a folder in a step. The folder has a checkpoint, or leftovers of a dead save."""
    work = file_names.parse_work_dir(name)
    return name if work is None else work.role
