"""Model folders by name: one that is here, or one that the Hugging Face hub has."""

import functools
import re
from pathlib import Path

# What a model folder needs; no weights in other formats.
WANTED = ("*.json", "model*.safetensors", "tokenizer.model", "merges.txt", "*.jinja")
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@functools.lru_cache(maxsize=64)
def local_folder(path: str | Path) -> Path:
    """Return the folder that `path` names, and download it where it is a name of the hub.

    `owner/model` is looked up where there is no folder of that name, and none of its owner's
    either. The download goes to huggingface_hub's cache, and is not repeated.

    Raises:
      FileNotFoundError: the hub is not reachable, or does not give the model.
    """
    folder = Path(path)
    if folder.exists() or not _NAME.fullmatch(str(path)) or folder.parent.exists():
        return folder
    import huggingface_hub  # here: only who asks for a name waits for the import

    try:
        return Path(huggingface_hub.snapshot_download(str(path), allow_patterns=list(WANTED)))
    except Exception as error:  # of the network, of the hub, of the disk: many kinds
        said = " ".join(str(error).split())[:300]
        raise FileNotFoundError(
            f"{path} is no folder here, and the hub did not give it: {said}; name a folder, or "
            "put the model's files into one"
        ) from error
