"""Prepare against its floor: python tests/tools/prepare_floor.py [pictures=64] [rounds=3] [size=256] [vae=sd|thin] [threads=1] [clock=cpu|wall]

Three things in turn in one process, in images a second: Pillow alone (each picture decoded and cropped), the
autoencoder alone (on pictures that are cropped already, mirrored copies too), and `experiments/prepare.py`'s writer,
which does both. On one core no preparation can take less than the first two together; where there are cores for both,
than the slower of them. Pictures: JPEGs of ImageNet's usual 500x375, made on the spot.
vae=sd has Stable Diffusion's structure with random weights; vae=thin an eighth of its width, as a GPU would be quick.
"""

import io
import itertools
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])
OPTIONS = {"pictures": "64", "rounds": "3", "size": "256", "vae": "sd", "threads": "1", "clock": "cpu"}
OPTIONS |= dict(word.split("=") for word in sys.argv[1:])
os.environ["OMP_NUM_THREADS"] = OPTIONS["threads"]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from diffusers import AutoencoderKL  # noqa: E402
from PIL import Image  # noqa: E402

from experiments.data.encoders import Autoencoder  # noqa: E402
from experiments.data.open_source import open_source  # noqa: E402
from experiments.data.raw_images import center_crop  # noqa: E402
from experiments.data.store_writer import StoreSettings, StoreWriter  # noqa: E402

COUNT, ROUNDS, SIZE, THREADS = (int(OPTIONS[key]) for key in ("pictures", "rounds", "size", "threads"))
BATCH = 16


def pictures(folder):
    """JPEGs with the statistics of photographs, roughly: noise that falls off with frequency."""
    draws = np.random.default_rng(0)
    for n in range(COUNT):
        levels = [draws.normal(size=(375 >> k, 500 >> k, 3)) * 2**k for k in range(7)]
        large = [
            np.asarray(Image.fromarray(np.uint8(np.clip(128 + 12 * level, 0, 255))).resize((500, 375)))
            for level in levels
        ]
        Image.fromarray(np.mean(large, 0).astype(np.uint8)).save(folder / f"{n:04d}.jpg", quality=92)


def autoencoder(folder):
    width = 128 if OPTIONS["vae"] == "sd" else 16
    channels = [width, 2 * width, 4 * width, 4 * width]
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=channels, down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        layers_per_block=2, norm_num_groups=min(32, width), scaling_factor=0.18215,
    ).save_pretrained(folder)  # fmt: skip
    return Autoencoder(str(folder))


def decoded(content):
    with Image.open(io.BytesIO(content)) as image:
        return center_crop(image, SIZE)


def main():
    now = time.process_time if OPTIONS["clock"] == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").mkdir()
        pictures(folder / "in")
        vae = autoencoder(folder / "vae")
        contents = [path.read_bytes() for path in sorted((folder / "in").iterdir())]
        images = torch.from_numpy(np.stack([decoded(content) for content in contents])).permute(0, 3, 1, 2)
        fresh = (folder / f"out{k}" for k in itertools.count())

        def pillow():
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(decoded, contents))

        def encoder():
            for chunk in images.split(BATCH):
                vae.encode(chunk)
                vae.encode(chunk.flip(-1))

        def prepare():
            source = open_source(folder / "in")
            writer = StoreWriter(source, vae, next(fresh), StoreSettings(vae="vae", size=SIZE), None, BATCH, THREADS)
            for k in writer.missing():
                list(writer.write(k))
            assert writer.finish().count == COUNT

        seconds = {pillow: [], encoder: [], prepare: []}
        for n in range(ROUNDS + 1):
            for run, spent in seconds.items():
                began = now()
                run()
                if n:  # The first round warms up.
                    spent.append(now() - began)
        for run, spent in seconds.items():
            print(f"{run.__name__:8} {COUNT / statistics.median(spent):8.2f} images/s")
        one, two, whole = seconds[pillow], seconds[encoder], seconds[prepare]
        rounds = list(zip(one, two, whole, strict=True))
        after = statistics.median((p + e) / w for p, e, w in rounds)
        print(
            f"prepare reaches {after:.2f} of what Pillow and the encoder allow one after the other ({OPTIONS['clock']} clock)"
        )


if __name__ == "__main__":
    main()
