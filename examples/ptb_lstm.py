"""Penn Treebank as in the DGC paper: a two-layer LSTM of 1,500 units, vanilla SGD with clipping, density 0.1%.

    horovodrun -np 4 python examples/ptb_lstm.py --data ptb

The data are ptb.train.txt, ptb.valid.txt and ptb.test.txt, a sentence a line (Mikolov's preparation). Four ranks with
5 sequences each make a batch of 20. The paper reports a test perplexity of 72.30 without compression, 72.24 with it.
Selection per bucket and bfloat16 values are ours; with --values fp32 --dense-values fp32 the values are the paper's.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from pathlib import Path

import common
import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule

WINDOW = 35  # words through which a gradient goes back
TEST_COLUMNS = 10  # sequences in which a test text is read, of every rank the same
END = "<eos>"
HOPELESS = 50  # nats a word; a model that knows nothing has about 9
States = tuple[Tensor, Tensor]


def read(folder: Path) -> tuple[dict[str, Tensor], int]:
    """Each part of the text ("train", "valid", "test") as numbers of words; and how many words there are."""
    number: dict[str, int] = {}
    parts = {}
    for part in ("train", "valid", "test"):
        file = folder / f"ptb.{part}.txt"
        if not file.exists():
            raise SystemExit(f"{file} is missing; the folder must have ptb.train.txt, ptb.valid.txt and ptb.test.txt")
        words = [word for line in file.read_text(encoding="utf-8").splitlines() for word in [*line.split(), END]]
        if part == "train":
            number = {word: place for place, word in enumerate(dict.fromkeys(words))}
        unknown = next((word for word in words if word not in number), None)
        if unknown is not None:
            raise SystemExit(f"{file}: {unknown!r} is not in ptb.train.txt; rare words should read <unk>")
        parts[part] = torch.tensor([number[word] for word in words])
    return parts, len(number)


def columns(numbers: Tensor, count: int) -> Tensor:
    """The text as `count` sequences beside each other, (time, count)."""
    length = len(numbers) // count
    if length < 2:
        raise SystemExit(f"a text of {len(numbers)} words is too short for {count} sequences")
    return numbers[: length * count].view(count, length).t().contiguous()


def windows(sequences: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Words and the words that follow them, window by window."""
    for start in range(0, len(sequences) - 1, WINDOW):
        end = min(start + WINDOW, len(sequences) - 1)
        yield sequences[start:end], sequences[start + 1 : end + 1]


class LanguageModel(nn.Module):
    """Embedding, LSTM and an output that shares the embedding's weights (Press & Wolf 2017)."""

    def __init__(self, words: int, width: int, dropout: float = 0.65) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=dropout)
        self.output = nn.Linear(width, words)
        self.output.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)

    def forward(self, words: Tensor, states: States | None) -> tuple[Tensor, States]:
        """Scores of every next word, and the states behind the last."""
        hidden, states = self.lstm(self.dropout(self.embedding(words)), states)
        return self.output(self.dropout(hidden)), states

    def loss(self, words: Tensor, following: Tensor, states: States | None) -> tuple[Tensor, States]:
        """Mean cross entropy in nats, and the states behind the last word, cut off from the graph."""
        scores, states = self(words, states)
        return cross_entropy(scores.flatten(0, 1), following.flatten()), tuple(s.detach() for s in states)


@torch.no_grad()
def mean_loss(model: LanguageModel, sequences: Tensor) -> float:
    """In nats a word, the same on every rank: the learning rate depends on it."""
    model.eval()
    total, states = 0.0, None
    for words, following in windows(sequences):
        loss, states = model.loss(words, following, states)
        total += float(loss) * len(words)
    model.train()
    own = torch.tensor(total / (len(sequences) - 1), dtype=torch.float64)
    return float(hvd.allreduce(own, name="mean loss"))


def main() -> None:
    """Train on all ranks and report from rank 0."""
    parser = common.arguments(
        "A two-layer LSTM on Penn Treebank with the settings of the DGC paper.",
        lr_falls="to a quarter after an epoch that brought nothing",
        density=0.001, epochs=40, batch_size=5, lr=20.0, warmup_epochs=1, clip_norm=0.25,
    )  # fmt: skip
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with ptb.train.txt, ptb.valid.txt, ptb.test.txt"
    )
    parser.add_argument("--width", type=int, default=1500, metavar="W", help="units of each layer")
    args = parser.parse_args()
    parts, vocabulary = read(args.data)
    hvd.init()
    torch.manual_seed(args.seed)
    device = f"cuda:{hvd.local_rank()}" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    model = LanguageModel(vocabulary, args.width)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # from the host: a Horovod without CUDA can do that too
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    own = slice(hvd.rank() * args.batch_size, (hvd.rank() + 1) * args.batch_size)
    train = columns(parts["train"], args.batch_size * hvd.size())[:, own].to(device)
    valid, test = (columns(parts[part], TEST_COLUMNS).to(device) for part in ("valid", "test"))
    steps_per_epoch = math.ceil((len(train) - 1) / WINDOW)
    compressed = args.compression not in common.UNCOMPRESSED
    compression = getattr(Compression, args.compression)
    if compressed:
        epochs = args.warmup_epochs
        warmup = WarmupSchedule(epochs=epochs, steps_per_epoch=steps_per_epoch) if epochs else None
        compression = compression(**common.fields(args), clip_norm=args.clip_norm, warmup=warmup)
    optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

    torch.manual_seed(1000 * args.seed + hvd.rank())  # each rank drops other units
    progress, start = common.Progress(args.epochs, hvd.rank()), time.perf_counter()
    best, kept = math.inf, model.state_dict()  # on the validation text
    for _ in range(args.epochs):
        states = None
        for words, following in windows(train):
            optimizer.zero_grad()
            loss, states = model.loss(words, following, states)
            loss.backward()
            if compressed:
                optimizer.step()  # clip_norm has been applied on the way
            else:
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
                with optimizer.skip_synchronize():
                    optimizer.step()
        found = mean_loss(model, valid)
        if found < best:
            best, kept = found, copy.deepcopy(model.state_dict())
        else:
            for group in optimizer.param_groups:
                group["lr"] /= 4
        progress.advance(found)
    seconds = time.perf_counter() - start
    numel = sum(p.numel() for p in model.parameters())
    sent = common.traffic(optimizer, numel, args.compression, args.epochs * steps_per_epoch, hvd.size())
    if not best < HOPELESS:
        raise SystemExit(f"the validation loss never fell below {HOPELESS} nats a word; try a lower --lr")
    model.load_state_dict(kept)
    quality = math.exp(mean_loss(model, test))
    if hvd.rank() == 0:
        common.report(args, "perplexity", quality, seconds, sent)


if __name__ == "__main__":
    main()
