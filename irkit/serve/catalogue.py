"""Open models and indexes, and find them by name. No request ever names a path or a model to load."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from irkit.arguments import suggest
from irkit.encoder import Encoder
from irkit.errors import BadValueError, IrkitError, StorageError
from irkit.index.directory import MANIFEST
from irkit.model import Model
from irkit.model.cross_encoder import CrossEncoder
from irkit.model.hub import local_directory
from irkit.ray_engine import ShardedRetriever
from irkit.ray_engine.ray_start import parse_engine
from irkit.remote.remote_retriever import RemoteRetriever
from irkit.retrieval.collection import check_model
from irkit.retrieval.retriever import Retriever
from irkit.serve.access import with_new_keys
from irkit.serve.problems import Problem, hide
from irkit.serve.search_work import find
from irkit.serve.serve_config import ServeConfig
from irkit.serve.served_indexes import ServedIndex
from irkit.serve.served_models import ServedModel
from irkit.serve.served_remotes import RemoteAddress, ServedRemote, open_remote, parse_address
from irkit.utils.uris import is_uri

T = TypeVar("T")


class Catalogue:
    """All models and indexes of a server, each opened once.

    Attributes:
        models: Served models by name, and heads by ``NAME/HEAD``; models of indexes are among them.
        indexes: Served indexes by name.
        ready: Whether requests are taken; False before the start is complete and during the shutdown.

    Raises:
        BadValueError: There is nothing to serve, or two things have one name.
        StorageError: A path is neither an index nor a model.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config, self.ready = config, False
        self.models: dict[str, ServedModel] = {}
        self.indexes: dict[str, ServedIndex] = {}
        self._loaded: dict[str, ServedModel] = {}  # by the name that the model is loaded by
        paths = name_paths(config.paths)
        models = [name for name, path in paths.items() if not _is_index(path)]
        for name in models:  # first, so that their names are not taken
            self._serve(name, paths[name])
        for name in [name for name in paths if name not in models]:
            self._open_index(name, paths[name])

    def _open_index(self, name: str, path: str) -> None:
        config, work, address = self.config, partial(find, self), parse_address(path)
        for place in (path,) if address is None else (address.location, address.source):
            if place:
                _hide(place, name)
        if address is None:
            index = ServedIndex(name, path, self._load, work, config.limits, is_shared=config.workers > 1)
            source = str(index.retriever().store.meta["model"]["name"])
        else:
            index = ServedRemote(name, address, self._load_remote, work, config.limits)
            source = str(index.retriever().about["model"]["name"])
        self.indexes[name] = index
        if (served := self._loaded.get(_model_key(source))) is not None:
            served.indexes.append(name)

    def _load_remote(self, address: RemoteAddress) -> RemoteRetriever:
        """Open documents in an engine, with the model that indexes of that model have."""
        remote = open_remote(address)
        saved = remote.about["model"]
        if address.source or "settings" in saved or not saved["name"]:
            return remote
        remote.close()
        return open_remote(address, self._model_of(str(saved["name"])))

    def _model_of(self, source: str) -> Model:
        """Return the model of an index, loaded once for all indexes."""
        if _model_key(source) not in self._loaded:
            self._serve(_free(Path(source).name, self.models), source)
        return self._loaded[_model_key(source)].retriever_model()

    def _load(self, path: str) -> Retriever:
        """Open an index with the model that other indexes of that model have."""
        config = self.config
        retriever = Retriever.load(path, device=config.device, dtype=config.dtype)
        manifest = retriever.store.meta["model"]
        if "settings" in manifest or not manifest["name"]:  # no encoder
            if config.engine is not None:
                retriever.close()
                retriever = self._load_ray(path)
            retriever.model  # noqa: B018 (loads it)
            return retriever
        retriever.close()
        source = str(manifest["name"])
        model = self._model_of(source)
        try:
            return self._load_with(path, model)
        except BadValueError:  # perhaps the model was trained again since it was loaded
            return self._load_with(path, self._load_again(source, path, manifest))

    def _load_with(self, path: str, model: Model) -> Retriever:
        if self.config.engine is None:
            return Retriever.load(path, model, verify=False)
        return self._load_ray(path, model)

    def _load_again(self, source: str, path: str, manifest: Mapping[str, Any]) -> Model:
        """Serve a model as it is now in its directory, if an index was built with it.

        Other indexes keep the model that they were opened with.

        Raises:
            BadValueError: The index was built with another model.
            StorageError: The model cannot be loaded.
        """
        key = _model_key(source)
        old, loaded = self._loaded[key], _load_model(source, self.config)
        new = ServedModel(old.name, loaded, self.config.limits)
        model = new.retriever_model()
        check_model(Path(path), manifest, model)
        new.indexes, self._loaded[key] = old.indexes, new
        for name in [name for name, served in self.models.items() if served is old]:
            self._serve(name, source)
        return model

    def _load_ray(self, path: str, model: Model | None = None) -> ShardedRetriever:
        address, timeout = parse_engine(str(self.config.engine)), min(30, self.config.limits.seconds)
        return ShardedRetriever.load(path, model, address=address, timeout=timeout, verify=False)

    def _serve(self, name: str, source: str) -> None:
        key = _model_key(source)
        _hide(source, name)
        if key not in self._loaded:
            self._loaded[key] = ServedModel(name, _load_model(source, self.config), self.config.limits)
        served = self.models[name] = self._loaded[key]
        self.models |= {f"{name}/{head}": part for head, part in served.heads.items()}

    def model(self, name: str | None = None) -> ServedModel:
        """Return a model; by default the first one.

        Raises:
            Problem: No model has this name.
        """
        if name is None and self.models:
            return next(iter(self.models.values()))
        return _lookup(self.models, name or "", "model")

    def index(self, name: str) -> ServedIndex:
        """Return an index.

        Raises:
            Problem: No index has this name.
        """
        return _lookup(self.indexes, name, "index")

    def warm(self) -> None:
        """Use each model and each index once, so that the first client does not wait."""
        for served in self.models.values():
            if isinstance(served.model, Model):
                served.model.encode(["warm"])
        for index in self.indexes.values():
            with suppress(BadValueError, TypeError):  # an index of vectors takes no text
                index.retriever().search("warm", 1)
        self.ready = True

    def reload(self) -> None:
        """Read the keys and open the indexes again, as they are now; models stay, if the indexes fit them.

        Raises:
            BadValueError: A line of the keys is malformed; all stays as it was.
            StorageError: The keys cannot be read, or some of the indexes cannot be opened; these stay as they
                were.
        """
        self.config = with_new_keys(self.config)
        problems = []
        for index in self.indexes.values():
            try:
                index.reload()
            except IrkitError as error:
                problems.append(str(error))
        if problems:
            raise StorageError("; ".join(problems))

    async def close(self) -> None:
        """Close all models and indexes, once their running requests have ended."""
        self.ready = False
        for index in self.indexes.values():
            await index.close()
        for served in self.models.values():
            await served.batcher.close()


def name_paths(paths: tuple[str, ...]) -> dict[str, str]:
    """Return paths by name: of ``NAME=PATH``, or else the last part of the path.

    Raises:
        BadValueError: ``paths`` is empty, or two have one name.

    Examples:
        >>> name_paths(("indexes/notes", "e5=intfloat/e5-small"))
        {'notes': 'indexes/notes', 'e5': 'intfloat/e5-small'}
    """
    pairs = []
    for path in paths:
        name, is_given, rest = path.partition("=")
        pairs.append((name, rest) if is_given else (Path(path.partition("#")[0]).resolve().name, path))
    if not pairs:
        raise BadValueError("serving: nothing was given; expected directories of indexes, or models")
    wrong = [name for name, _ in pairs if not name or "/" in name]
    if wrong:
        raise BadValueError(f"serving: the name {wrong[0]!r} is empty or has a slash; expected NAME=PATH")
    [(name, count)] = Counter(name for name, _ in pairs).most_common(1)
    if count > 1:
        raise BadValueError(f"serving: {count} paths have the name {name!r}; give NAME=PATH")
    return dict(pairs)


def check_paths(paths: tuple[str, ...]) -> None:
    """Check that indexes open and that models are there; a model of the hub is downloaded.

    Raises:
        BadValueError: ``paths`` is empty, or two have one name.
        StorageError: A path is neither an index nor a model, or an index cannot be read.
    """
    for path in name_paths(paths).values():
        if address := parse_address(path):
            open_remote(address).close()
        elif _is_index(path):
            Retriever.load(path).close()  # its model is not loaded
        else:
            with _as_model(path):
                local_directory(path)


def _is_index(path: str) -> bool:
    return parse_address(path) is not None or is_uri(path) or (Path(path) / MANIFEST).exists()


@contextmanager
def _as_model(source: str) -> Iterator[None]:
    """Add to errors inside the block that the path was read as a model, because it is not an index."""
    try:
        yield
    except StorageError as error:
        raise StorageError(f"serving {source}: it is no index, and as a model: {error}") from error


def _load_model(source: str, config: ServeConfig) -> Model | CrossEncoder:
    with _as_model(source):
        folder = local_directory(source)
    settings = folder / "config.json"
    if settings.is_file() and not (folder / "modules.json").exists():
        with suppress(ValueError, AttributeError):
            if "SequenceClassification" in " ".join(json.loads(settings.read_text())["architectures"]):
                return CrossEncoder(source, device=config.device)
    with _as_model(source):
        model = Model.from_pretrained(source, device=config.device, dtype=config.dtype)
    for part in model.modules():
        if isinstance(part, Encoder):
            part.pack_()
    return model


def _lookup(items: Mapping[str, T], name: str, what: str) -> T:
    if name not in items:
        hint = suggest(name, items) if items else "the server has none"
        raise Problem(404, f"there is no {what} {name[:60]!r}; {hint}")
    return items[name]


def _model_key(source: str) -> str:
    """Return one name for all ways to name a model directory."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def _hide(place: str, name: str) -> None:
    """Let answers tell a name instead of a place on this machine or a URI."""
    path = Path(place)
    for spelling in [place.rstrip("/")] if is_uri(place) else [path, path.absolute(), path.resolve()]:
        hide(str(spelling), name)


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """Return a name that is not taken: with a number, if need be."""
    numbered = (f"{name}-{number}" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(other for other in numbered if other not in taken)
