"""Routes of other servers that this one does not have, each with the reason."""

from __future__ import annotations

_NOT_VECTORS = (
    "This server writes text: it has no embeddings, scores or classes; ask a server with a model "
    "made for them."
)
_NOT_MEDIA = "This server reads and writes text; ask a server with a model made for other media."
_NOT_KEPT = "This server keeps no files, batches or assistants; send each request by itself."
_NO_COMPACT = "No conversation is compacted here; send the input that is to be answered."
_NO_COUNT = "Only /tokenize and /v1/messages/count_tokens tell how many tokens a prompt has."
_ABSENT = {
    **dict.fromkeys(
        ("/embeddings", "/embed", "/rerank", "/v2/rerank", "/score", "/classify", "/pooling"),
        _NOT_VECTORS,
    ),
    **dict.fromkeys(("/moderations", "/encode", "/similarity"), _NOT_VECTORS),
    **dict.fromkeys(("/audio", "/images", "/videos", "/realtime"), _NOT_MEDIA),
    **dict.fromkeys(
        (
            "/files",
            "/uploads",
            "/batches",
            "/assistants",
            "/threads",
            "/conversations",
            "/fine_tuning",
            "/vector_stores",
            "/containers",
            "/evals",
            "/messages/batches",
        ),
        _NOT_KEPT,
    ),
    "/responses/compact": _NO_COMPACT,
    "/responses/input_tokens": _NO_COUNT,
}
"""Path, without a leading /v1, and why there is none, nor any below it."""


def why_absent(path: str) -> str | None:
    """Why there is no such route, if other servers have it."""
    path = path.removeprefix("/v1")
    while path and path not in _ABSENT:
        path = path.rpartition("/")[0]
    return _ABSENT.get(path)
