"""All defects in one program: each is behind a number that is chosen when the program starts."""

import re

# Before a comment at the beginning of each file that has defects, or in the first empty line; lines
# keep their numbers.
DECLARATION = "bool tilemoe_defect(int); "
# In the machine, so in each of the simulator's programs. A number is noted when its place is reached, whether chosen or not.
DEFINITION = """
#include <cstdlib>
#include <fstream>

namespace {

constexpr int kMostDefects = 1024;
bool reached[kMostDefects];

int chosen() {
  static const int number = [] {
    const char* const text = std::getenv("TILEMOE_DEFECT");
    return text ? std::atoi(text) : 0;
  }();
  return number;
}

const struct Reached {
  ~Reached() {
    const char* const file = std::getenv("TILEMOE_DEFECTS_REACHED");
    if (!file) return;
    std::ofstream out(file);
    for (int i = 0; i < kMostDefects; ++i)
      if (reached[i]) out << i << "\\n";
  }
} kReached;

}  // namespace

bool tilemoe_defect(int number);
bool tilemoe_defect(int number) {
  reached[number] = true;
  return number == chosen();
}
"""


def wrapped(text, defect, number):
    """What stands before and after the text that the defect replaces. A dropped call leaves its
    semicolon."""
    chosen = f"tilemoe_defect({number})"
    old = text[defect.begin:defect.end]
    if defect.id.startswith("drop/"):
        return f"{{ if (!{chosen}) ", " }", text.index(";", defect.end) + 1
    new = re.sub(r"\s*\n\s*", " ", defect.new)
    if old.rstrip().endswith(";"):
        return f"if ({chosen}) {{ {new} }} else {{ ", " }", defect.end
    # A constant expression has no defect.
    return f"(!__builtin_is_constant_evaluated() && {chosen} ? ({new}) : (", "))", defect.end


def with_switches(text, defects):
    """The file's text with each of its defects, given with their numbers, behind a switch. Defects
    may be parts of one another's places."""
    inserted = []  # (place, inner first at an end, outer first at a beginning, text)
    for defect, number in defects:
        before, after, end = wrapped(text, defect, number)
        size = end - defect.begin
        inserted.append((defect.begin, 1, -size, number, before))
        inserted.append((end, 0, size, -number, after))
    for place, _, _, _, new in sorted(inserted, key=lambda one: one[:4], reverse=True):
        text = text[:place] + new + text[place:]
    return re.sub(r"^(?=//|$)", DECLARATION, text, count=1, flags=re.M)


def write_switches(tree, defects):
    """Puts all of them into a copy of the checkout."""
    of_file = {}
    for number, defect in enumerate(defects, start=1):
        of_file.setdefault(defect.file, []).append((defect, number))
    for file, own in of_file.items():
        text = (tree / file).read_text()
        (tree / file).write_text(with_switches(text, own))
    machine = tree / "simulator" / "machine" / "trace.cpp"
    machine.write_text(machine.read_text() + DEFINITION)
