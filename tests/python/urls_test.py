"""The project's public addresses stand in one file, cmake/project_urls.txt: README.md, CITATION.cff
and the pages have those and no others, and no placeholder."""

import re
import sys
import unittest

import pages
from pages import ROOT

sys.path.append(str(ROOT / "cmake"))
from project_urls import project_urls  # noqa: E402

PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in pages.all_pages()}
CITATION = (ROOT / "CITATION.cff").read_text()
NOT_PUBLIC = "clone of this repository"


def wrong_addresses(urls, texts, citation):
    """The faults of README.md, the pages and CITATION.cff, a sentence each."""
    repository = urls.get("Repository")
    cloned = {
        (name, address)
        for name, text in texts.items()
        for snippet in pages.snippets(text)
        for address in re.findall(r"git clone (?:-\S+ )*(\S+)", snippet.text)
    }
    wrong = [
        f"{name} clones {address}, not {repository}"
        for name, address in cloned
        if address.strip("\"'") != repository
    ]
    cited = re.findall(r'^(?:repository-code|url): "?([^"\n]*)"?$', citation, re.MULTILINE)
    if cited != [urls[name] for name in ("Repository",) if name in urls]:
        wrong.append(f"CITATION.cff names {cited}, not repository-code: {repository}")
    readme = texts["README.md"]
    if repository and "README.md" not in {name for name, _ in cloned}:
        wrong.append(f"README.md does not clone {repository}")
    if repository and NOT_PUBLIC in readme:
        wrong.append(f"README.md says `{NOT_PUBLIC}`, and there is {repository}")
    if not repository and NOT_PUBLIC not in readme:
        wrong.append(f"README.md does not say `{NOT_PUBLIC}`, and there is no Repository")
    return wrong


class Addresses(unittest.TestCase):
    def test_those_of_the_file_are_everywhere(self):
        self.assertEqual(wrong_addresses(project_urls(), PAGES, CITATION), [])

    def test_the_first_address_must_be_written_everywhere(self):
        """Texts without it, and texts with it."""
        address = "https://example.org/tilemoe"
        urls = project_urls(f"# a comment\n\nRepository = {address}\nIssues = {address}/issues\n")
        self.assertEqual(urls, {"Repository": address, "Issues": f"{address}/issues"})
        without = {"README.md": f"In a {NOT_PUBLIC}."}
        self.assertEqual(len(wrong_addresses(urls, without, "title: x\n")), 3)
        wrong = {"README.md": "```sh\ngit clone https://example.org/other\n```\n"}
        self.assertEqual(len(wrong_addresses(urls, wrong, "")), 2)
        right = {"README.md": f"```sh\ngit clone {address} && cd tilemoe\n```\n"}
        citation = f'title: x\nrepository-code: "{address}"\n'
        self.assertEqual(wrong_addresses(urls, right, citation), [])
        self.assertEqual(len(wrong_addresses({}, right, citation)), 3)

    def test_the_file_has_known_names_and_addresses_alone(self):
        for line in ("Source = https://a.b", "Repository = $ADDRESS", "https://a.b",
                     "Issues = https://a.b\nIssues = https://a.b"):  # fmt: skip
            with self.assertRaisesRegex(ValueError, "project_urls.txt: "):
                project_urls(line)


class Placeholders(unittest.TestCase):
    def test_commands_read_no_variable_that_they_do_not_set(self):
        wrong = [
            f"{name}:{snippet.line}: ${variable}"
            for name, text in PAGES.items()
            for snippet in pages.snippets(text)
            if snippet.language == "sh"
            for variable in re.findall(r"\$\{?([A-Za-z_]\w*)", snippet.text)
            if not re.search(rf"\b{variable}=|\b(?:for|read) {variable}\b", snippet.text)
        ]
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
