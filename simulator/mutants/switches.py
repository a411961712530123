"""All defects in one program: each is behind a number that is chosen when the program starts.

The simulator's programs take the number from the environment. A GPU's kernels read it from constant
memory, where the program's file has it: program_with() chooses it, in a copy, without a compiler.
"""

import re
import struct

# Before a comment at the beginning of each file that has defects, or in the first empty line; lines
# keep their numbers.
DECLARATION = "bool tilemoe_defect(int); "
MOST_DEFECTS = 1024
# In the machine, so in each of the simulator's programs. A number is noted when its place is reached,
# whether chosen or not.
DEFINITION = """
#include <cstdlib>
#include <fstream>

namespace {

constexpr int kMostDefects = MOST_DEFECTS;
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
""".replace("MOST_DEFECTS", str(MOST_DEFECTS))

# For every CUDA file, before all else. The words around the number are to find it by. Host code may
# write such a variable, so the compiler decides nothing by what it holds.
FOUND_BY = (0x7FA31C5E, 0xB92D6408, 0x4E17D3C1)
CHOSEN = "return tilemoe_defect_words[2] == number;"


def gpu_definition(body, more=""):
    return f"""#pragma once
static __constant__ unsigned tilemoe_defect_words[4] = {{
    {FOUND_BY[0]:#x}, {FOUND_BY[1]:#x}, 0, {FOUND_BY[2]:#x}}};
{more}static __host__ __device__ __forceinline__ bool tilemoe_defect(unsigned number) {{
#ifdef __CUDA_ARCH__
  {body}
#else
  return false;
#endif
}}
"""


# Of a program without defects that notes the places which its kernels reach. Each file has notes of
# its own; tests/cuda/cases.cpp asks for all of them at its end.
NOTE_PLACE = "tilemoe_reached[number] = 1;\n  return false;"
NOTES = f"""#include <cstdio>
struct TilemoeNotes {{
  using Read = bool(unsigned char (&)[{MOST_DEFECTS}]);
  inline static TilemoeNotes* last = nullptr;
  Read* read;
  TilemoeNotes* before;
  explicit TilemoeNotes(Read* reads) : read(reads), before(last) {{ last = this; }}
}};
static __device__ unsigned char tilemoe_reached[{MOST_DEFECTS}];
static TilemoeNotes tilemoe_notes([](unsigned char (&to)[{MOST_DEFECTS}]) {{
  return cudaMemcpyFromSymbol(to, tilemoe_reached, sizeof to) == cudaSuccess;
}});
extern "C" __attribute__((weak)) bool tilemoe_write_notes(const char* name) {{
  std::FILE* const file = std::fopen(name, "w");
  if (file == nullptr) return false;
  bool all = true;
  for (TilemoeNotes* one = TilemoeNotes::last; one != nullptr; one = one->before) {{
    unsigned char reached[{MOST_DEFECTS}] = {{}};
    all &= one->read(reached);
    for (int number = 1; number < {MOST_DEFECTS}; ++number)
      if (reached[number] != 0) std::fprintf(file, "%d\\n", number);
  }}
  return std::fclose(file) == 0 && all;
}}
"""


def program_with(number, program):
    """The bytes of a GPU program with that number chosen in each of its files' kernels."""
    def words(chosen):
        return struct.pack("<4I", *FOUND_BY[:2], chosen, FOUND_BY[2])

    if words(0) not in program:
        raise ValueError("no defect can be chosen in this program")
    return program.replace(words(0), words(number))


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


def with_switches(text, defects, declaration=DECLARATION):
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
    return re.sub(r"^(?=//|$)", declaration, text, count=1, flags=re.M)


def write_into_kernels(tree, defects, declaration):
    of_file = {}
    for number, defect in enumerate(defects, start=1):
        of_file.setdefault(defect.file, []).append((defect, number))
    for file, own in of_file.items():
        text = (tree / file).read_text()
        (tree / file).write_text(with_switches(text, own, declaration))


def write_switches(tree, defects):
    """Puts all of them into a copy of the checkout, for the simulator."""
    write_into_kernels(tree, defects, DECLARATION)
    machine = tree / "simulator" / "machine" / "trace.cpp"
    machine.write_text(machine.read_text() + DEFINITION)


# How the kernels with defects are built otherwise than the library's.
BUILT_FOR_A_GPU = {
    "src/cuda/sources.cmake": [("--compress-mode=size", "--no-compress"),
                               (";-Xptxas=-Werror", "")],
    "src/cuda/instances/instances.cmake": [("list(APPEND code -Xptxas=-Werror)", "")],
}


def write_gpu_switches(tree, defects):
    """The same for a GPU; returns what the configuration needs, the header of write_gpu_header()
    among it. Kernels are not compressed, so that the number is found, and may spill: they are not
    timed."""
    write_into_kernels(tree, defects, "")
    for file, edits in BUILT_FOR_A_GPU.items():
        text = (tree / file).read_text()
        for old, new in edits:
            if old not in text:
                raise ValueError(f"{tree / file} has no {old}")
            text = text.replace(old, new)
        (tree / file).write_text(text)
    return [f"-DCMAKE_CUDA_FLAGS=-include {tree / 'defect.h'} -diag-suppress 3060"]


def write_gpu_header(tree, places):
    """For a program with the defects, or one without, that notes the places which are reached."""
    text = gpu_definition(NOTE_PLACE, NOTES) if places else gpu_definition(CHOSEN)
    (tree / "defect.h").write_text(text)
