"""Images in their final size, against transformers' own processor: pixels, positions and soft rows are equal."""

from __future__ import annotations

import io

import numpy as np
import pytest

pillow = pytest.importorskip("PIL.Image")

from edge_runtime.errors import RequestError
from edge_runtime.media.decoder import decode_image
from edge_runtime.media.encoder_inputs import BUDGETS, Image, final_size

# float32 of value / 255, computed as a product there and here in another order.
TOLERANCE = 6e-8
SIZES = [(48, 48), (640, 480), (31, 900), (900, 31), (1, 40), (1000, 1001), (3000, 17)]


@pytest.fixture(scope="module")
def processor():
    transformers = pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4")
    return transformers.Gemma4ImageProcessorPil()


def picture(width: int, height: int, mode: str = "RGB", seed: int = 3):
    values = np.random.default_rng(seed).integers(0, 256, (height, width, len(mode)), dtype=np.uint8)
    return pillow.fromarray(values, mode) if len(mode) > 1 else pillow.fromarray(values[..., 0])


def png(image, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, options.pop("format", "PNG"), **options)
    return file.getvalue()


def assert_equal(ours: Image, image, processor, budget: int) -> None:
    expected = processor(images=image, max_soft_tokens=budget, return_tensors="np")
    count = ours.rows * 9
    assert expected["num_soft_tokens_per_image"][0] == ours.rows
    np.testing.assert_allclose(ours.patches(), expected["pixel_values"][0][:count], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(ours.positions(), expected["image_position_ids"][0][:count])
    assert (expected["image_position_ids"][0][count:] == -1).all()


@pytest.mark.parametrize("size", SIZES)
def test_equals_the_processor(size, processor):
    image = picture(*size)
    assert_equal(decode_image(png(image), 280), image, processor, 280)


@pytest.mark.parametrize("budget", BUDGETS)
def test_budgets_equal_the_processor(budget, processor):
    image = picture(333, 257)
    ours = decode_image(png(image), budget)
    assert ours.rows <= budget
    assert_equal(ours, image, processor, budget)


@pytest.mark.parametrize("budget", BUDGETS)
def test_final_sizes_equal_the_processor(budget):
    reference = pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4").get_aspect_ratio_preserving_size
    for height, width in np.random.default_rng(budget).integers(1, 5000, (500, 2)).tolist():
        try:
            expected = reference(height, width, patch_size=16, max_patches=budget * 9, pooling_kernel_size=3)
        except ValueError:
            with pytest.raises(RequestError, match="crop it"):
                final_size(height, width, budget)
        else:
            assert final_size(height, width, budget) == expected


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L"])
def test_transparency_lies_on_white(mode, processor):
    image = picture(100, 60, mode)
    assert_equal(decode_image(png(image), 70), image, processor, 70)


def test_a_turned_photo_is_turned(processor):
    image = picture(90, 50)
    tags = image.getexif()
    tags[274] = 6
    data = png(image, format="JPEG", exif=tags, quality=95)
    ours = decode_image(data, 70)
    assert ours.rgb.shape[0] > ours.rgb.shape[1]
    from PIL import ImageOps

    assert_equal(ours, ImageOps.exif_transpose(pillow.open(io.BytesIO(data))), processor, 70)


def test_a_square_has_as_many_rows_as_published():
    assert [decode_image(png(picture(48, 48)), budget).rows for budget in BUDGETS] == [64, 121, 256, 529, 1089]


@pytest.mark.parametrize("budget", [0, 69, 281])
def test_another_budget_is_refused(budget):
    with pytest.raises(RequestError, match="choose one of 70, 140, 280, 560, 1120"):
        final_size(10, 10, budget)


def test_a_huge_claim_is_refused_before_it_is_decoded():
    data = bytearray(png(picture(8, 8)))
    data[16:24] = (9_000).to_bytes(4, "big") * 2
    import zlib

    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    with pytest.raises(RequestError, match="9000 x 9000 pixels, at most 64 million"):
        decode_image(bytes(data), 280)
