"""Packages beside transformers' model and processor of the same weights, which say what a prompt and a file give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import soundfile
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessorPil,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2AudioProcessor,
    SiglipImageProcessorPil,
    WhisperFeatureExtractor,
)

import waybill
from llavas import PATCH, SIDE
from zoo import LAYOUTS, ZOO, Layout, Tiny, pack

NEW, RATE = 6, 16_000
PLACES = {"image": "<image>", "audio": "<|AUDIO|>"}
TINY = {tiny.title: tiny for tiny in ZOO}
CLIP, SIGLIP, AUDIO = "LLaVA: CLIP, Llama", "LLaVA: SigLIP, Qwen2", "Qwen2-Audio"
FLOAT, PACKED = (layout for layout in LAYOUTS if layout.title in ("float", "decoder 4, the other 8 bits"))


def words(kind: str | None, ending: int | None = None) -> Tokenizer:
    """w0, w1, …; token 100 is the place of a file, and `ending` stands after every text."""
    special = {PLACES[kind]: 100} if kind else {}
    vocabulary = {f"w{n}": n for n in range(128) if n not in special.values()} | special
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([*special])
    if ending is not None:
        word = f"w{ending}"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {word}", pair=f"$A $B {word}", special_tokens=[(word, ending)]
        )
    return tokenizer


def extractor(frames: int) -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=16, chunk_length=1, hop_length=RATE // frames)


def processor(title: str, tokenizer: Tokenizer) -> Any:
    """transformers' own, which also saves the files that a checkpoint has."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    if title == AUDIO:
        return Qwen2AudioProcessor(extractor(22), fast)
    if title == CLIP:
        pictures = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
        extra = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    else:
        pictures = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
        extra = {"vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
    return LlavaProcessor(pictures, fast, patch_size=PATCH, **extra)


@dataclass
class Both:
    """A package, and transformers' model and processor of the same weights."""

    tiny: Tiny
    package: Path
    checkpoint: Path
    tokenizer: Tokenizer
    model: Callable[..., Any]
    processor: Any
    eos: int | None = None
    start: Sequence[int] = field(default=())

    def ids(self, text: str, file: Path | None = None) -> list[int]:
        """Greedy tokens for one text, complete, and one file."""
        inputs = self.inputs(text, file)
        made: list[int] = []
        for _ in range(NEW):
            with torch.no_grad():
                last = self.model(**inputs).logits[0, -1]
            if self.tiny.never is not None:
                last[self.tiny.never] = -torch.inf
            token = int(last.argmax())
            if token == self.eos:
                break
            made.append(token)
            inputs[self.tiny.grows] = torch.cat([inputs[self.tiny.grows], torch.tensor([[token]])], 1)
            if "attention_mask" in inputs and self.tiny.grows == "input_ids":
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return made

    def text(self, text: str, file: Path | None = None) -> str:
        return self.tokenizer.decode(self.ids(text, file), skip_special_tokens=True)

    def inputs(self, text: str, file: Path | None) -> dict[str, Any]:
        """What transformers' model is given."""
        if self.tiny.title == "Whisper":
            assert file is not None
            features = self.processor(soundfile.read(file)[0], sampling_rate=RATE, return_tensors="pt")
            begin = [*self.start, *self.tokenizer.encode(text, add_special_tokens=False).ids]
            return {"input_features": features.input_features, "decoder_input_ids": torch.tensor([begin])}
        if self.tiny.title.startswith("T5"):
            ids = torch.tensor([self.tokenizer.encode(text).ids])
            return {"input_ids": ids, "decoder_input_ids": torch.zeros(1, 1, dtype=torch.long)}
        if file is None:
            return {"input_ids": torch.tensor([self.tokenizer.encode(text).ids])}
        if self.tiny.title == AUDIO:
            sound = soundfile.read(file)[0]
            return dict(self.processor(text=text, audio=sound, sampling_rate=RATE, return_tensors="pt"))
        return dict(self.processor(text=text, images=Image.open(file), return_tensors="pt"))


def export(tiny: Tiny, layout: Layout, root: Path) -> Both:
    """A checkpoint with all its files, and its package, in which packed products are exact, to be compared.

    Head and embedding are one in one of the models.
    """
    tied = tiny.title == CLIP
    packed, dense, _ = pack(tiny, tiny.make(tied, root / "float"), layout)
    folder = packed.write(root / "checkpoint")
    kind = {CLIP: "image", SIGLIP: "image", AUDIO: "audio"}.get(tiny.title)
    eos = {"Whisper": 2}.get(tiny.title, 1 if tiny.title.startswith("T5") else None)
    tokenizer = words(kind, eos)
    tokenizer.save(str(folder / "tokenizer.json"))
    whole = processor(tiny.title, tokenizer) if kind else extractor(20) if tiny.title == "Whisper" else None
    if whole is not None:
        whole.save_pretrained(folder)
    waybill.build(folder, exact=True).save(root / "package")
    return Both(
        tiny, root / "package", folder, tokenizer, tiny.load(dense, root / "dense"), whole, eos,
        (3,) if tiny.title == "Whisper" else (),
    )  # fmt: skip


Make = Callable[..., Both]
