"""transforms_train.json: scenes of Blender, in the layout of NeRF's synthetic ones."""

from __future__ import annotations

from pathlib import Path

from splatcli.config import DataConfig
from splatcli.scene.find_images import is_file
from splatcli.scene.nerfstudio import load_transforms, read_views
from splatcli.scene.source import Problems, Reader, SceneSource

FILE = "transforms_train.json"


def read_blender(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    """Read ``transforms_train.json``, with ``transforms_test.json`` as the held-out views; there are no points."""
    train_file, test_file = root / FILE, root / "transforms_test.json"
    train = read_views(load_transforms(train_file), root, train_file, data, problems)
    source = SceneSource(root, train_file, train, [root], resized_folders=False)
    if test_file.is_file():
        document = load_transforms(test_file)
        test = read_views(document, root, test_file, data, problems) if document.get("frames") != [] else []
        source.views = train + test
        source.train, source.test = {view.name for view in train}, {view.name for view in test}
    else:
        source.notes.append("transforms_test.json is missing: views are held out of transforms_train.json")
    return source


READER = Reader("blender", FILE, lambda root: is_file(root / FILE), read_blender)
