"""The prepared directory of a tokenizer that has no tokenizer.json: the file is made once, of the vocabulary
that is there (SentencePiece, tiktoken, vocab.json with merges.txt, vocab.txt), and cached.

transformers converts the vocabulary, and its import brings torch with it. It therefore happens in a child
process (`nbengine.models.checkpoints.tokenizer_convert`), and the process that asks stays free of torch.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from nbengine.errors import ModelLoadError, shown
from nbengine.models.checkpoints.storage import cache_dir, new_directory
from nbengine.runtime.progress import Reporter

_FORMAT = 1
"""A part of the cache key, to be raised whenever the content of a prepared directory changes."""
REFUSED = 3
"""The exit status of the child when it has printed a message for the user instead of a traceback."""
NOT_APPLIED = "nbengine_not_applied"
"""The entry of a prepared tokenizer_config.json that lists what its sources say and the tokenizer does not do."""
FAST = "tokenizer.json"
VOCABULARIES = (
    "tokenizer.model",
    "tokenizer.model.v*",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "tiktoken.model",
    "*.tiktoken",
    "tekken.json",
    "merges.txt",
    "vocab.txt",
)
"""Files of which a tokenizer can be made; the first that is there says what is."""
BESIDE = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""Files that a conversion takes into account."""
_MOST_LISTED = 12


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory has a tokenizer.json, or a vocabulary of which one can be made."""
    return (directory / FAST).is_file() or bool(vocabulary_files(directory))


def vocabulary_files(directory: Path) -> list[str]:
    """Return the names of the vocabularies in a directory, the one that counts first."""
    return [
        path.name for pattern in VOCABULARIES for path in sorted(directory.glob(pattern)) if path.is_file()
    ]


def no_tokenizer(directory: Path) -> ModelLoadError:
    """Make the error of a directory that has no tokenizer: what is in it, and what would do."""
    names = sorted(os.listdir(directory))
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    content = ", ".join(names[:_MOST_LISTED]) + more if names else "nothing"
    return ModelLoadError(
        f"{directory} has no tokenizer.json; name another tokenizer with the argument tokenizer, or put the file "
        f"there, or a vocabulary to make it of ({', '.join(VOCABULARIES)}). The directory has {content}"
    )


def prepared_tokenizer(directory: Path, mode: str, report: Reporter) -> Path:
    """Return the directory with the tokenizer.json of a tokenizer: `directory` itself, or a prepared one.

    Args:
        mode: "auto" makes the file only where there is none, "fast" never, and "slow" always, so that the
            model's own vocabulary counts and not the file beside it.

    Raises:
        ModelLoadError: there is no such file, or it cannot be made; the message says what would do.
    """
    has_fast = (directory / FAST).is_file()
    if has_fast and mode != "slow":
        return directory
    vocabularies = vocabulary_files(directory)
    if not vocabularies and mode == "slow":
        raise ModelLoadError(
            f"{directory} has no vocabulary for tokenizer_mode='slow' ({', '.join(VOCABULARIES)}); 'auto' takes "
            "its tokenizer.json"
            if has_fast
            else str(no_tokenizer(directory))
        )
    if not vocabularies:
        raise no_tokenizer(directory)
    if mode == "fast":
        raise ModelLoadError(
            f"{directory} has no tokenizer.json, which tokenizer_mode='fast' asks for; 'auto' makes it of "
            f"{vocabularies[0]}"
        )
    destination = cache_dir() / "prepared" / _key(directory)
    if not destination.is_dir():
        report(f"converting the tokenizer in {directory.name}")
        with new_directory(destination) as content:
            _convert(directory, content, vocabularies[0])
    return destination


def _key(directory: Path) -> str:
    identity: list[object] = [_FORMAT, version("transformers"), version("tokenizers"), directory.resolve()]
    try:
        for pattern in (*VOCABULARIES, *BESIDE):
            for path in sorted(directory.glob(pattern)):
                stat = path.stat()
                identity += [path.relative_to(directory), stat.st_size, stat.st_mtime_ns]
    except OSError as error:
        raise ModelLoadError(f"cannot read {directory}: {error}") from error
    digest = hashlib.sha256("\0".join(map(str, identity)).encode()).hexdigest()
    return f"{directory.name[:80]}-{digest[:16]}"


def _convert(directory: Path, content: Path, vocabulary: str) -> None:
    module = "nbengine.models.checkpoints.tokenizer_convert"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-m", module, str(directory), str(content)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    reason = done.stderr.strip() if done.returncode == REFUSED else lines[-1]
    raise ModelLoadError(
        f"{directory} has no tokenizer.json, and none can be made of its {shown(vocabulary)}: {reason}. Name another "
        "tokenizer with the argument tokenizer, or put a tokenizer.json there"
    )
