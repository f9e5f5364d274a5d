"""Routes of other servers that this one does not have, each with the reason."""

from __future__ import annotations

_NOT_VECTORS = (
    "This server writes text: it has no embeddings, scores or classes; ask a server with a model "
    "made for them."
)
_NOT_MEDIA = "This server reads and writes text; ask a server with a model made for other media."
_NOT_KEPT = "This server keeps no files, batches or assistants; send each request by itself."
ABSENT = {
    **dict.fromkeys(
        ("/embeddings", "/embed", "/rerank", "/v2/rerank", "/score", "/classify", "/pooling"),
        _NOT_VECTORS,
    ),
    **dict.fromkeys(("/moderations", "/encode", "/similarity"), _NOT_VECTORS),
    **dict.fromkeys(
        (
            "/audio/speech",
            "/audio/transcriptions",
            "/audio/translations",
            "/images/generations",
            "/images/edits",
            "/realtime",
        ),
        _NOT_MEDIA,
    ),
    **dict.fromkeys(
        ("/files", "/batches", "/assistants", "/threads", "/fine_tuning/jobs", "/vector_stores"),
        _NOT_KEPT,
    ),
    "/messages/batches": _NOT_KEPT,
}
"""Path, without a leading /v1, and why there is none."""
