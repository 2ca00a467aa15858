"""LlamaIndex's class for rankings in Jina's form."""

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.postprocessor.jinaai_rerank import JinaRerank

from tests.clients.trial import Report, check, served, serving

TEXTS = ["a red bird", "Once upon a time there was a house.", "x"]


def main() -> None:
    report = Report("llama-index-postprocessor-jinaai-rerank")
    _, model = served()
    with report.trial("JinaRerank: nodes"):
        ranker = JinaRerank(model=model, base_url=f"{serving('score')}/v1", api_key="none", top_n=2)
        nodes = [NodeWithScore(node=TextNode(text=each)) for each in TEXTS]
        found = ranker.postprocess_nodes(nodes, query_str="Which bird is red?")
        check(len(found) == 2, found)
        check(found[0].score >= found[1].score, found)
    report.print()


if __name__ == "__main__":
    main()
