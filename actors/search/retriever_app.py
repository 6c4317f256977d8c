"""The retriever as a server, under the HTTP contract of Search-R1 and those who followed it.

POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}   or   {"query": "..."}
             -> {"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}
                a list per query; without scores: {"result": [[{"id", "contents"}, ...], ...]}
GET /healthz -> {"status": "ok", "num_documents": 5000}
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, model_validator

from leeway.actors.search.documents import Document
from leeway.actors.search.index import Bm25Index

MAX_QUERIES: Final = 512
MAX_TOP_K: Final = 100
MAX_QUERY_CHARS: Final = 4096

_Query = Annotated[str, Field(max_length=MAX_QUERY_CHARS)]


class RetrieveRequest(BaseModel):
    """Both request shapes. Other keys are let pass, as the field's servers do."""

    model_config = ConfigDict(extra="ignore")

    queries: list[_Query] | None = Field(default=None, min_length=1, max_length=MAX_QUERIES)
    query: _Query | None = None
    topk: int | None = Field(default=None, ge=1, le=MAX_TOP_K)
    return_scores: bool = False

    @model_validator(mode="after")
    def _check(self) -> RetrieveRequest:
        if (self.queries is None) == (self.query is None):
            raise ValueError('send either "queries", a list of texts, or "query", one text')
        return self


def build_app(index: Bm25Index, default_top_k: int = 3) -> FastAPI:
    """The application that serves `index`."""
    app = FastAPI(title="Leeway retriever")

    # Not `async`: a query over a large corpus takes milliseconds, so FastAPI runs it in its bounded
    # thread pool and the health check answers meanwhile.
    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest) -> dict[str, list[list[dict[str, Any]]]]:
        queries = request.queries if request.queries is not None else [request.query or ""]
        hits_of_query = index.search(queries, request.topk or default_top_k)
        return {
            "result": [
                [_entry(document, score, request.return_scores) for document, score in hits]
                for hits in hits_of_query
            ]
        }

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok", "num_documents": len(index)}

    return app


def _entry(document: Document, score: float, with_score: bool) -> dict[str, Any]:
    contents = f'"{document.title}"\n{document.text}' if document.title else document.text
    record = {"id": document.id, "contents": contents}
    return {"document": record, "score": score} if with_score else record
