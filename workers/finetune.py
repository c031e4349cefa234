"""Fine-tune a language model of Hugging Face with LoRA adapters; only the adapters travel. Nothing is downloaded.

pip install '.[finetune]'
python workers/finetune.py                                             alone, in one process
paramserver run workers/finetune.py --servers 2 --workers 2            on a cluster on this machine
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import paramserver as ps

BYTES = 256


def pieces(length: int, count: int) -> TensorDataset:
    """Pieces of a source of the standard library, as bytes: shape (count, length)."""
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    step = (len(text) - length) // count
    rows = [torch.tensor(list(text[i * step : i * step + length])) for i in range(count)]
    return TensorDataset(torch.stack(rows))


def build(width: int, layers: int, rank: int) -> Any:
    """A Llama made from a configuration, with random weights, and LoRA on its attention."""
    torch.manual_seed(0)  # the base does not travel: every worker makes the same one
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), lora)


def main() -> None:
    """Train, and say what travels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128, help="numbers in a hidden state, a multiple of 8")
    parser.add_argument("--layers", type=int, default=4, help="layers of the base model")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--pieces", type=int, default=256, help="pieces of text in an epoch")
    parser.add_argument("--epochs", type=int, default=1, help="epochs")
    parser.add_argument("--batch-size", type=int, default=8, help="pieces in a batch")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--save", default="", help="directory for the adapters, as peft saves them")
    options = parser.parse_args()
    with ps.init() as ctx:
        model = build(options.width, options.layers, options.rank)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained, lr=options.lr)
        loader: Any = DataLoader(pieces(64, options.pieces), batch_size=options.batch_size, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader, only_trained=True)
        if ctx.is_main:
            whole, mine = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in trained)
            print(f"{whole} parameters, of which {mine} are trained and travel", flush=True)
        for _ in ctx.epochs(options.epochs):
            for (tokens,) in loader:
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                ctx.log(loss=loss)
        if options.save and ctx.is_main:
            model.save_pretrained(options.save)


if __name__ == "__main__":
    main()
