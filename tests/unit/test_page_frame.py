"""The frame that every report of one file has."""

from leeway.services.page_frame import framed


def test_a_title_is_text_and_a_body_is_markup():
    page = framed("a <b> & {}", ".x { color: red }", "<p>{} {title}</p>")
    assert "<title>a &lt;b&gt; &amp; {}</title>" in page
    assert "<body>\n<p>{} {title}</p>\n</body>" in page
    assert page.index("--paper") < page.index(".x { color: red }") < page.index("</style>")
    assert page.count("<!doctype html>") == 1


def test_nothing_refers_to_the_outside():
    page = framed("t", "", "")
    assert "http" not in page and "url(" not in page and "@import" not in page
