"""All nodes of a job stage the same list of files: one makes it, the others are told. Runs on compute nodes."""

from pathlib import Path

from hpc.core.errors import TorchrelayError
from hpc.staging.cancellable_wait import CancellableWait
from hpc.staging.peers import Peer, PeerError, PeerServer
from hpc.staging.source import SourceListing, list_source
from hpc.staging.team import StagingGroup


def find_list(
    source: Path, team: StagingGroup, server: PeerServer | None, patience: CancellableWait, notes: list[str]
) -> SourceListing:
    """The files of a source: listed by the leading node, told to the others.

    Args:
        source: a directory or an archive.
        team: the nodes.
        server: this node's, which hands the list out.
        patience: is asked whether to stop.
        notes: get the reason if this node had to make its own list.

    Raises:
        StagingStopped: it was asked to stop.
        TorchrelayError: the source cannot be listed, or is another one than the leading node has seen.
    """
    if not team.leads:
        try:
            return _told(source, team, patience)
        except PeerError as error:
            notes.append(str(error))
    listing = list_source(source, patience.stopped)
    if team.leads:
        if server:
            server.listings[listing.entry] = listing.pack()
        team.offer(listing.entry, server.port if server else 0)
        return listing
    plan = team.plan()
    if plan and plan.entry and plan.entry != listing.entry:
        raise TorchrelayError(
            f"{source} was changed since {plan.lister[0]} listed it: wait until nobody writes to it any more, then "
            "submit again"
        )
    return listing


def _told(source: Path, team: StagingGroup, patience: CancellableWait) -> SourceListing:
    # A source of a million files takes minutes; should the leading node die, `patience` says so.
    while (plan := team.plan()) is None:
        patience.wait()
    with Peer(plan.lister, team.nonce, plan.entry) as peer:
        listing = patience.meanwhile(peer.listing)
    if listing.source != source or listing.entry != plan.entry:
        raise PeerError(f"{plan.lister[0]} sent the list of something else")
    return listing
