"""The picture of the operations in docs/edit.md: one command a tile, all seen by one camera.

splat train data/samples/courtyard -r 2 -n 3000 --cap-max 20000 -o output/scene
python scripts/edit_pictures.py output/scene docs/pictures/operations.jpg
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

#: Arguments of splat edit after the model; SCENE stands for the model once more.
TILES = (
    "",
    "--crop sphere:0,0,0.6,2.3",
    "--crop-out polygon:z:-1.5,-1.5,1.5,-1.5,1.5,1.5,-1.5,1.5",
    "--filter 'scale>0.03'",
    "--simplify 5%",
    "--sh-degree 0",
    "--rotate 0,0,20",
    "--scale 0.7",
    "SCENE --crop sphere:0,0,1.2,0.5 --translate 0,0,0.8",
)
COLUMNS, WIDTH, LABEL, QUALITY = 3, 320, 20, 72
#: The training camera whose view is shown.
VIEW = "view_012"


def splat(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "splatcli", *map(str, words), "-q"], check=True, stdout=subprocess.DEVNULL)


def tile(run: Path, arguments: str, folder: Path) -> Image.Image:
    """The model after one edit, as the camera in folder/camera.json sees it."""
    model, picture = folder / "edited.ply", folder / "picture.png"
    words = [str(run) if word == "SCENE" else word.strip("'") for word in arguments.split()]
    splat("edit", run, *words, "-o", model, "-w")
    splat("render", model, "--views", folder / "camera.json", "-o", picture)
    image = Image.open(picture).convert("RGB")
    return image.resize((WIDTH, round(WIDTH * image.height / image.width)), Image.Resampling.LANCZOS)


def main() -> None:
    run, output = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        splat("export", run, "-o", folder / "all.json")
        known = json.loads((folder / "all.json").read_text(encoding="utf-8"))
        known["cameras"] = [camera for camera in known["cameras"] if Path(camera["name"]).stem == VIEW]
        (folder / "camera.json").write_text(json.dumps(known), encoding="utf-8")
        images = [tile(run, arguments, folder) for arguments in TILES]
    height = images[0].height + LABEL
    sheet = Image.new("RGB", (COLUMNS * WIDTH, -(-len(images) // COLUMNS) * height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for number, (image, arguments) in enumerate(zip(images, TILES, strict=True)):
        x, y = number % COLUMNS * WIDTH, number // COLUMNS * height
        sheet.paste(image, (x, y))
        draw.text((x + 4, y + image.height + 3), arguments or "the model", font=font, fill="black")
    sheet.save(output, quality=QUALITY)


if __name__ == "__main__":
    main()
