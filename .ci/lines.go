//go:build ignore

// Command lines counts the Go code of two commits and says where the difference comes
// from. It reads all modules of the repository and formats each file as gofmt does.
//
//	go run .ci/lines.go [-before COMMIT] [-after COMMIT]
//
// The part "code" is the main module outside tests, internal/testkit and benchmarks.
// Columns: lines; lines if each longer than 120 columns (a tab is 4) is wrapped; then,
// of the difference between the commits:
//
//	moved       lines that are in another file now
//	re-wrapped  lines that declarations gained or lost whose text is equal but for white space
//	removed     lines that are in no file any more
//	added       lines that were in no file before
package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode"
	"unicode/utf8"
)

const columns = 120

func main() {
	before := flag.String("before", "d0863be", "commit")
	after := flag.String("after", "HEAD", "commit")
	flag.Parse()
	if err := run(*before, *after); err != nil {
		fmt.Fprintln(os.Stderr, "lines:", err)
		os.Exit(1)
	}
}

func run(before, after string) error {
	a, err := read(before)
	if err != nil {
		return err
	}
	b, err := read(after)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "part\t%s\tat %d\t%s\tat %d\tmoved\tre-wrapped\tremoved\tadded\t\n", before, columns, after, columns)
	for _, part := range []string{"code", "tests", "testkit", "benchmarks", "generated", "other modules"} {
		c := compare(a[part], b[part])
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%d\t%+d\t%d\t%d\t\n", part, a[part].lines, a[part].wrapped, b[part].lines, b[part].wrapped,
			c.moved, c.rewrapped, c.removed, c.added)
	}
	return w.Flush()
}

// part is the code of one kind.
type part struct {
	lines, wrapped int
	pieces         map[string][]piece // by their text without white space
}

// piece is a declaration with its comment, or what lies between two of them.
type piece struct {
	file string
	text []string // its lines
}

// read sorts the files of a commit into parts.
func read(commit string) (map[string]*part, error) {
	archive, err := exec.Command("git", "archive", commit).Output()
	if err != nil {
		return nil, fmt.Errorf("git archive %s: %w", commit, err)
	}
	files, modules := map[string][]byte{}, []string{}
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if path.Base(h.Name) == "go.mod" && h.Name != "go.mod" {
			modules = append(modules, path.Dir(h.Name)+"/")
		}
		if strings.HasSuffix(h.Name, ".go") {
			if files[h.Name], err = io.ReadAll(r); err != nil {
				return nil, err
			}
		}
	}
	parts := map[string]*part{}
	for name, text := range files {
		if text, err = format.Source(text); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		kind := kindOf(name, modules)
		if kind != "other modules" && ast.IsGenerated(file) {
			kind = "generated"
		}
		if parts[kind] == nil {
			parts[kind] = &part{pieces: map[string][]piece{}}
		}
		parts[kind].add(name, set, file, text)
	}
	for _, kind := range []string{"code", "tests", "testkit", "benchmarks", "generated", "other modules"} {
		if parts[kind] == nil {
			parts[kind] = &part{}
		}
	}
	return parts, nil
}

// testkit are internal/testkit and the folders that it was made of.
var testkit = []string{
	"internal/testkit", "internal/algotest", "internal/alloctest", "internal/blastest", "internal/drivertest", "internal/nccltest",
	"internal/shim", "internal/onecurve", "internal/powerloss", "internal/ownworld", "internal/grid", "internal/pages",
	"kernels/cpu/interp", "kernels/optest", "comm/null", "device/null", "device/fault", "kernels/null", "kernels/cuda/sass", "benchmarks/cuda/gpucheck",
}

func kindOf(name string, modules []string) string {
	in := func(folder string) bool { return strings.HasPrefix(name, folder+"/") }
	switch {
	case slices.ContainsFunc(modules, func(m string) bool { return strings.HasPrefix(name, m) }):
		return "other modules"
	case strings.HasSuffix(name, "_test.go"):
		return "tests"
	case slices.ContainsFunc(testkit, in):
		return "testkit"
	case in("benchmarks"), in("internal/fio"), in(".ci"):
		return "benchmarks"
	}
	return "code"
}

// add cuts a file into its declarations.
func (p *part) add(name string, set *token.FileSet, file *ast.File, text []byte) {
	lines := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	p.lines += len(lines)
	for _, l := range lines {
		p.wrapped += max(1, (width(l)+columns-1)/columns)
	}
	from := 0
	cut := func(to int) {
		if to > from {
			piece := piece{name, lines[from:to]}
			key := squeezed(strings.Join(piece.text, "\n"))
			p.pieces[key] = append(p.pieces[key], piece)
			from = to
		}
	}
	for _, d := range file.Decls {
		begin := d.Pos()
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Doc != nil {
				begin = d.Doc.Pos()
			}
		case *ast.GenDecl:
			if d.Doc != nil {
				begin = d.Doc.Pos()
			}
		}
		cut(set.Position(begin).Line - 1)
		cut(set.Position(d.End()).Line)
	}
	cut(len(lines))
}

func width(line string) int { return utf8.RuneCountInString(line) + 3*strings.Count(line, "\t") }

// squeezed is a text without white space, and without the commas and slashes that come
// and go with line breaks.
func squeezed(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsSpace(r) || r == ',' || r == '/' {
			return -1
		}
		return r
	}, s)
}

type change struct{ moved, rewrapped, removed, added int }

// compare pairs equal declarations first, then equal lines of the others.
func compare(a, b *part) (c change) {
	type at struct{ here, there map[string]int } // a line's files before and after
	left := map[string]*at{}
	note := func(p piece, after bool) {
		for _, l := range p.text {
			l = squeezed(l)
			if left[l] == nil {
				left[l] = &at{map[string]int{}, map[string]int{}}
			}
			if after {
				left[l].there[p.file]++
			} else {
				left[l].here[p.file]++
			}
		}
	}
	for key, before := range a.pieces {
		after := slices.Clone(b.pieces[key])
		for _, p := range before {
			i := slices.IndexFunc(after, func(q piece) bool { return q.file == p.file })
			if i < 0 {
				i = len(after) - 1
			}
			if i < 0 {
				note(p, false)
				continue
			}
			if q := after[i]; q.file != p.file {
				c.moved += len(q.text)
			}
			c.rewrapped += len(after[i].text) - len(p.text)
			after = slices.Delete(after, i, i+1)
		}
		for _, q := range after {
			note(q, true)
		}
	}
	for key, after := range b.pieces {
		if a.pieces[key] == nil {
			for _, q := range after {
				note(q, true)
			}
		}
	}
	for _, l := range left {
		before, after := 0, 0
		for file, n := range l.here {
			same := min(n, l.there[file])
			l.there[file] -= same
			before += n - same
		}
		for _, n := range l.there {
			after += n
		}
		c.moved += min(before, after)
		c.removed += before - min(before, after)
		c.added += after - min(before, after)
	}
	return c
}
