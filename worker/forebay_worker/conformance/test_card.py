"""The card: true, and with every blob that it names."""

from forebay_shared.models import CAP_DIGESTS, CAP_EMBED, CAP_GENERATE, content_hash
from tokenizers import Tokenizer

from forebay_worker.conformance.driver import Driven
from forebay_worker.engines.base import CacheTeller, Encoder, Teller


def test_the_card_names_a_model_and_its_sizes(driven: Driven) -> None:
    card = driven.card
    assert card.names
    assert card.engine
    assert card.revision, "answers of two revisions are never mixed: say which this is"
    assert card.vocab_size > 0
    assert card.max_model_len > 1
    assert card.block_size > 0
    assert {CAP_GENERATE, CAP_EMBED} & card.capabilities


def test_blobs_are_what_their_hashes_say_and_the_tokenizer_loads(driven: Driven) -> None:
    card, blobs = driven.card, driven.engine.blobs
    assert all(content_hash(data) == name for name, data in blobs.items())
    if card.speaks_text:
        assert not card.tokenizer, "who speaks text has no tokens that others know"
        return
    tokenizer = Tokenizer.from_str(blobs[card.tokenizer].decode())
    assert 0 < tokenizer.get_vocab_size() <= card.vocab_size
    if card.chat_template:
        assert card.chat_template in blobs


def test_an_engine_that_embeds_says_so_and_can(driven: Driven) -> None:
    assert isinstance(driven.engine, Encoder) >= (CAP_EMBED in driven.card.capabilities)
    if CAP_EMBED in driven.card.capabilities:
        assert driven.card.embedding is not None


def test_an_engine_that_speaks_text_says_so_and_can(driven: Driven) -> None:
    generates = CAP_GENERATE in driven.card.capabilities
    assert isinstance(driven.engine, Teller) >= (driven.card.speaks_text and generates)
    assert bool(driven.card.parameters) >= driven.card.speaks_text, "say which fields it takes"


def test_an_engine_that_tells_of_its_cache_says_so(driven: Driven) -> None:
    engine = driven.engine
    tells = isinstance(engine, CacheTeller) and engine.cache_log is not None
    assert tells == (CAP_DIGESTS in driven.card.capabilities)


def test_it_is_healthy_and_idle_before_any_work(driven: Driven) -> None:
    assert driven.engine.healthy
    assert driven.load().waiting == 0
