"""The encoder of images and sound in llama.cpp: libmtmd's vision and audio towers, but not its file decoders and resizing."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.kernels.loader import address_of
from edge_runtime.backends.llama.context import floats
from edge_runtime.backends.llama.loader import LlamaLibrary, declare, media_library
from edge_runtime.bundle.gguf_gemma4 import check_encoder
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.media.encoder_inputs import Image, Sound

# enum llama_flash_attn_type. With "auto", libmtmd would encode a warm-up image to choose.
_FLASH_ON = 1
# The first node of the audio tower's graph, a view of its input (tools/mtmd/models/gemma4a.cpp).
_SOUND_INPUT = b"inp_raw (transposed)"
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_get_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_nbytes": (ctypes.c_size_t, [ctypes.c_void_p]),
    "ggml_backend_tensor_set": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]),
}


class LlamaMediaEncoder:
    """An opened encoder for a loaded target. Implements `media.soft_rows.Encoder`. It must be closed before its target."""

    def __init__(self, library: LlamaLibrary, path: Path, model: Any, *, width: int, threads: int) -> None:
        """`width` is the target's hidden size. Raises BackendError if the file is damaged, fits another target, or does not load."""
        self._pointer: Any = None
        self._library = library
        self._api = media_library(library)
        self._ggml = declare(library.ggml, _SIGNATURES)
        self._mels: NDArray[np.float32] | None = None
        self._width = width
        self.facts = check_encoder(path, width)
        params = self._api.mtmd_context_params_default()
        params.use_gpu = params.print_timings = params.warmup = False
        params.n_threads = threads
        # Takes less than half of the time for a large image. It rounds K and V to float16 (clip.cpp), which trained models tolerate.
        params.flash_attn_type = _FLASH_ON
        # Images arrive in their final size. With the defaults, libmtmd would enlarge an image of fewer than 70 rows.
        params.image_min_tokens, params.image_max_tokens = 1, 1120
        self._callback = type(params.cb_eval)(self._give_mels)
        params.cb_eval = self._callback
        library.log.clear()
        self._pointer = self._api.mtmd_init_from_file(str(path).encode(), model, params)
        if not self._pointer:
            raise BackendError(f"llama.cpp could not load {path}{library.quoted_error()}; export it again, or free some memory")

    def encode(self, media: Image | Sound) -> NDArray[np.float32]:
        """Returns the soft rows [rows, hidden size]. Raises RequestError for sound without an audio tower, BackendError if it fails."""
        if self._pointer is None:
            raise RequestError("the media encoder is closed; open the bundle again")
        if isinstance(media, Sound) and not self.facts.has_audio:
            raise RequestError("this bundle's encoder takes images only; leave the sound out")
        if isinstance(media, Image) and max(media.rgb.shape[:2]) > self.facts.longest:
            # Here ggml would abort the process (ggml_get_rows).
            raise RequestError(f"the image is longer than this encoder's {self.facts.longest} pixels; crop it")
        api = self._api
        self._library.log.clear()
        bitmap, chunks = self._bitmap(media), api.mtmd_input_chunks_init()
        if isinstance(media, Sound) and self.facts.mel_frames:
            self._mels = np.ascontiguousarray(media.mel_frames().T)
        try:
            rows = self._encoded(bitmap, chunks)
            if self._mels is not None:
                raise BackendError("this build of llama.cpp takes sound in another form; install the version that the package asks for")
            return rows
        finally:
            self._mels = None
            api.mtmd_input_chunks_free(chunks)
            api.mtmd_bitmap_free(bitmap)

    def close(self) -> None:
        """Frees the encoder. Can be called twice."""
        if self._pointer is not None:
            self._api.mtmd_free(self._pointer)
            self._pointer = None

    def _give_mels(self, node: int, ask: bool, _: int) -> bool:
        """ggml's callback before each graph node; replaces the audio tower's input by our log-mel frames [mels, frames].

        libmtmd computes log(max(mel, 0.001)), but Gemma 4 was trained on log(mel + 0.001). For quiet sound, the rows differ by a tenth of
        their norm.
        """
        ggml, mels = self._ggml, self._mels
        if ask and mels is not None and ggml.ggml_get_name(node) == _SOUND_INPUT and ggml.ggml_nbytes(node) == mels.nbytes:
            ggml.ggml_backend_tensor_set(node, address_of(mels, np.float32, mels.size), 0, mels.nbytes)
            self._mels = None
        return False

    def _bitmap(self, media: Image | Sound) -> Any:
        if isinstance(media, Image):
            height, width = media.rgb.shape[:2]
            pixels = np.ascontiguousarray(media.rgb)
            place = address_of(pixels, np.uint8, width * height * 3)
            return self._api.mtmd_bitmap_init(width, height, ctypes.byref(ctypes.c_uint8.from_address(place)))
        samples = np.ascontiguousarray(media.samples, np.float32)
        place = address_of(samples, np.float32, len(samples))
        return self._api.mtmd_bitmap_init_from_audio(len(samples), ctypes.byref(ctypes.c_float.from_address(place)))

    def _encoded(self, bitmap: Any, chunks: Any) -> NDArray[np.float32]:
        api = self._api
        part = api.mtmd_input_part(text=None, bitmap=bitmap)
        parts = (ctypes.POINTER(api.mtmd_input_part) * 1)(ctypes.pointer(part))
        if api.mtmd_tokenize_from_parts(self._pointer, chunks, parts, 1, False) != 0:
            raise BackendError(f"llama.cpp refused the media{self._library.quoted_error()}; give another file")
        pointers = [api.mtmd_input_chunks_get(chunks, i) for i in range(api.mtmd_input_chunks_size(chunks))]
        encoded = []
        for chunk in pointers:
            if api.mtmd_input_chunk_get_type(chunk) == api.MTMD_INPUT_CHUNK_TYPE_TEXT:
                continue  # the begin and end tokens, which the prompt contains already
            if api.mtmd_encode_chunk(self._pointer, chunk) != 0:
                raise BackendError(f"llama.cpp failed to encode the media{self._library.quoted_error()}; try again")
            rows: int = api.mtmd_input_chunk_get_n_tokens(chunk)
            encoded.append(floats(api.mtmd_get_output_embd(self._pointer), rows, self._width).copy())
        return np.concatenate(encoded)
