"""Coverage: how much of the photos masks hide, from a sample, and a warning where that cannot be meant."""

from __future__ import annotations

from splatcli.errors import SceneError
from splatcli.scene.decode import decode
from splatcli.scene.images import OPAQUE, ImageStore
from splatcli.scene.masks import read_hidden

#: Masks that are looked at; a mean over so many is good to some percent, and reading them takes no second.
_LOOKS = 16
#: Who hides more than this of all photos has the masks inverted, more often than not.
_MOST = 0.95


def hidden_share(store: ImageStore) -> tuple[float, int] | None:
    """(the part of the photos that is hidden, mean over those looked at; their number); None where nothing can be.

    Masks that cannot be read are passed over: whoever needs them tells.
    """
    masked = [i for i, source in enumerate(store.sources) if store.alpha_hides or source.mask is not None]
    looked = [masked[k * len(masked) // _LOOKS] for k in range(_LOOKS)] if len(masked) > _LOOKS else masked
    shares = []
    for i in looked:
        try:
            shares.append(_share(store, i))
        except SceneError:
            continue
    return (sum(shares) / len(shares), len(shares)) if shares else None


def coverage_notes(store: ImageStore) -> list[str]:
    """What a user should know of it, a sentence; none where there are no masks."""
    found = hidden_share(store)
    if found is None:
        return []
    share, looked = found
    text = f"masks hide {_percent(share)} of the photos on average"
    if looked < len(store):
        text += f" ({looked} of {len(store)} looked at)"
    if share == 0.0:
        return [f"{text}: black or transparent hides, white counts; these masks do nothing"]
    if share > _MOST:
        return [f"{text}, which leaves little to learn from: black or transparent hides; are they inverted?"]
    return [text]


def _share(store: ImageStore, i: int) -> float:
    source = store.sources[i]
    if source.mask is not None:
        return float(read_hidden(source.mask, source.mask_orientation).mean())
    alpha = decode(source.path, None, source.orientation, source.stored).alpha
    return 0.0 if alpha is None else float((alpha < OPAQUE).mean())


def _percent(share: float) -> str:
    """0 % and 100 % only where it is all or nothing."""
    percent = 100.0 * share
    if 0.0 < percent < 1.0 or 99.0 < percent < 100.0:
        return f"{percent:.2g} %" if percent < 1.0 else "more than 99 %"
    return f"{percent:.0f} %"
