"""ImageStore: lazy, bounded, safe to use from several threads."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene.decode import DECODE_BYTES
from splatcli.scene.images import AHEAD, ByteCache
from splatcli.scene.read import read_scene
from tests.scene import made

IMAGE_BYTES = made.WIDTH * made.HEIGHT * 3


def test_the_cache_keeps_what_came_first() -> None:
    cache = ByteCache(30)
    calls: list[str] = []

    def get(key: str) -> bytes:
        def make() -> bytes:
            calls.append(key)
            return key.encode() * 10

        return cache.get(key, make, len)

    for key in "abcdabcdd":
        assert get(key) == key.encode() * 10
    assert "".join(calls) == "abcddd"
    assert cache.used == 30


def test_the_cache_keeps_nothing_larger_than_itself() -> None:
    cache = ByteCache(5)
    assert cache.get("a", lambda: bytes(6), len) == bytes(6)
    assert cache.used == 0


def test_images_are_decoded_when_asked_for_and_kept_under_the_budget(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    scene = read_scene(tmp_path, DataConfig(cache_bytes=2 * IMAGE_BYTES + 1))
    first = scene.images.load(0)
    assert scene.images.load(0) is first
    scene.images.load(1)
    third = scene.images.load(2)
    assert scene.images.load(0) is first
    again = scene.images.load(2)
    assert again is not third
    np.testing.assert_array_equal(again, third)


def test_a_lower_limit_keeps_fewer_and_is_what_images_take_at_most(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    images = read_scene(tmp_path, DataConfig(cache_bytes=100 * IMAGE_BYTES)).images
    decoding = images.max_bytes() - len(images) * IMAGE_BYTES
    assert decoding >= DECODE_BYTES * IMAGE_BYTES // 3
    images.limit(IMAGE_BYTES)
    assert images.max_bytes() == decoding + IMAGE_BYTES
    first, second = images.load(0), images.load(1)
    assert images.load(0) is first
    assert images.load(1) is not second
    images.limit(10 * IMAGE_BYTES)
    assert images.max_bytes() == decoding + IMAGE_BYTES, "a limit is only lowered"
    images.limit(0)
    assert images.max_bytes() == decoding


def test_a_damaged_image_is_an_error_only_when_it_is_loaded(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    path = tmp_path / "images/0003.png"
    path.write_bytes(path.read_bytes()[:200])
    scene = read_scene(tmp_path, DataConfig())
    scene.images.load(2)
    for _ in range(2):
        with pytest.raises(SceneError, match="damaged"):
            scene.images.load(3)


def test_an_image_that_changed_size_since_is_an_error(tmp_path: Path) -> None:
    scene = read_scene(made.colmap_scene(tmp_path), DataConfig())
    made.write_images(tmp_path / "images", ["0003.png"], size=(32, 24))
    with pytest.raises(SceneError, match="32x24 pixels now, it was 64x48"):
        scene.images.load(3)


def test_prefetched_images_are_the_same_and_errors_come_at_load(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    path = tmp_path / "images/0003.png"
    path.write_bytes(path.read_bytes()[:200])
    store = read_scene(tmp_path, DataConfig()).images
    for i in (1, 3, 1):
        store.prefetch(i)
    np.testing.assert_array_equal(store.load(1), made.picture(1))
    with pytest.raises(SceneError, match="damaged"):
        store.load(3)
    store.close()
    store.prefetch(2)
    np.testing.assert_array_equal(store.load(2), made.picture(2))
    store.close()


def test_images_that_nobody_loads_give_way_to_others(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    images = read_scene(tmp_path, DataConfig(cache_bytes=1)).images
    store = images.of(images.sources * 2)
    for i in range(2 * made.COUNT):
        store.prefetch(i)
    assert list(store._pending) == list(range(2 * made.COUNT))[-2 * AHEAD :]
    np.testing.assert_array_equal(store.load(0), made.picture(0))
    store.close()


def test_many_threads_get_the_right_images(tmp_path: Path) -> None:
    made.colmap_scene(tmp_path)
    store = read_scene(tmp_path, DataConfig(cache_bytes=3 * IMAGE_BYTES)).images
    wrong: list[int] = []

    def work(seed: int) -> None:
        for i in np.random.default_rng(seed).integers(0, made.COUNT, 40):
            store.prefetch(int(i + 1) % made.COUNT)
            if not np.array_equal(store.load(int(i)), made.picture(int(i))):
                wrong.append(int(i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert wrong == []


@pytest.mark.parametrize(("alpha", "opaque"), [(None, True), (255, True), (254, False)])
def test_an_image_is_opaque_where_nothing_shows_through(tmp_path: Path, alpha: int | None, opaque: bool) -> None:
    made.colmap_scene(tmp_path)
    scene = read_scene(tmp_path, DataConfig())
    path = scene.images.sources[0].path
    picture = Image.open(path).convert("RGB")
    if alpha is not None:
        picture.putalpha(255)
        picture.putpixel((3, 2), (10, 20, 30, alpha))
    picture.save(path, format="PNG")
    image = read_scene(tmp_path, DataConfig(), background=(0, 0, 0)).images.image(0)
    assert image.opaque is opaque
    assert image.alpha is None  # it is over the background
