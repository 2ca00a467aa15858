"""LlamaIndex's class for embeddings of servers with OpenAI's API."""

from llama_index.core.schema import TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

from tests.clients.trial import Report, check, served, serving


def main() -> None:
    report = Report("llama-index-embeddings-openai-like")
    _, model = served()
    to = {"model_name": model, "api_base": f"{serving('embed')}/v1", "api_key": "none"}
    embedding = OpenAILikeEmbedding(**to, max_retries=0)
    with report.trial("a query, a text, and 20 texts in batches"):
        query = embedding.get_query_embedding("hello")
        check(len(query) == len(embedding.get_text_embedding("What is 3 + 4?")), query)
        texts = [f"text {number}" for number in range(20)]
        check(len(embedding.get_text_embedding_batch(texts)) == 20, "another number")
    with report.trial("nodes"):
        [node] = embedding([TextNode(text="hello")])
        check(len(node.embedding) == len(query), node)
    with report.trial("dimensions"):
        short = OpenAILikeEmbedding(**to, dimensions=8).get_text_embedding("hello")
        check(len(short) == 8, short)
    report.print()


if __name__ == "__main__":
    main()
