// Faults plants faults in the code, one at a time, and runs the tests that should catch them. This
// measures how strong the test suite is.
//
// The faults are the *.txt files of this folder. A file holds any number:
//
//	== name, of what is wrong
//	in: graph/diff.go        (optional: the end of the path of the file or its folder)
//	-- old
//	the text, which occurs in exactly one Go file that is no test
//	-- new
//	the text in its place
//
// The old text is searched for, so files may move. A text that occurs nowhere or twice is an error.
// The source files do not change: the compiler gets the fault through go build's -overlay.
//
// For each fault the tests of its own package run first, then those of the packages that import it,
// nearest first, up to -depth imports away. After the first failing package no more tests run for
// that fault.
// failing package ends the fault.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// fault is one change of one file.
type fault struct {
	Name, In, Old, New string
	path               string // the file, relative to the tree
	dir                string // its package's folder, "." for the root
}

// result is a row of the table.
type result struct {
	Fault   string  `json:"fault"`
	Package string  `json:"package"`
	Outcome string  `json:"outcome"` // caught, survived, timeout, unbuildable
	By      string  `json:"by,omitempty"`
	Seconds float64 `json:"seconds"`
}

func main() {
	tree := flag.String("tree", ".", "the module's `folder`")
	files := flag.String("faults", "", "`folder` of the fault files; default internal/testkit/faults of the tree")
	match := flag.String("run", "", "only faults whose name or package matches this `regexp`")
	sample := flag.Int("sample", 0, "only this `number` of faults, drawn by -seed; default all")
	seed := flag.Uint64("seed", 1, "of -sample")
	depth := flag.Int("depth", 1, "run the packages up to this `number` of imports away")
	limit := flag.Duration("timeout", 5*time.Minute, "of a package's tests")
	skip := flag.String("skip", "^$", "of the packages that import the fault's, leave out those whose folder matches this `regexp`")
	only := flag.String("packages", "", "run the tests of these folders, `a,b`, and not those of the fault's package and its importers")
	tests := flag.String("tests", ".", "of the tests, run only those that match this `regexp`")
	most := flag.Duration("budget", 0, "start no further fault after this time; default none")
	out := flag.String("json", "", "the table's `file`: faults that it has are not run again, others are added")
	before := flag.String("compare", "", "a table that -json wrote: fail only where it says caught and this run does not")
	command := flag.String("go", "go", "the `command` to run go with")
	check := flag.Bool("check", false, "run no test: only check that each fault is found and builds")
	flag.Parse()
	o := options{*tree, *command, *tests, nil, *depth, *limit, nil}
	if *only != "" {
		o.only = strings.Split(*only, ",")
	}
	var err error
	if o.skip, err = regexp.Compile(*skip); err != nil {
		fmt.Fprintln(os.Stderr, "faults: -skip:", err)
		os.Exit(1)
	}
	if *files == "" {
		*files = filepath.Join(*tree, "internal/testkit/faults")
	}
	if err := run(o, *files, *match, *sample, *seed, *most, *out, *before, *check); err != nil {
		fmt.Fprintln(os.Stderr, "faults:", err)
		os.Exit(1)
	}
}

type options struct {
	tree, command, tests string
	only                 []string // folders; nil: by imports
	depth                int
	limit                time.Duration
	skip                 *regexp.Regexp
}

func run(o options, files, match string, sample int, seed uint64, most time.Duration, out, before string, check bool) error {
	var err error
	if o.tree, err = filepath.Abs(o.tree); err != nil {
		return err
	}
	list, err := read(files)
	if err != nil {
		return err
	}
	if err := locate(o.tree, list); err != nil {
		return err
	}
	re, err := regexp.Compile(match)
	if err != nil {
		return fmt.Errorf("-run: %w", err)
	}
	list = slices.DeleteFunc(list, func(f fault) bool { return !re.MatchString(f.Name) && !re.MatchString(f.dir) })
	if sample > 0 && sample < len(list) {
		rand.New(rand.NewPCG(seed, 0)).Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		list = list[:sample]
	}
	was := map[string]string{}
	if before != "" {
		rows, err := table(before)
		if err != nil {
			return err
		}
		for _, r := range rows {
			was[r.Fault] = r.Outcome
		}
	}
	var rows []result
	if out != "" {
		if rows, err = table(out); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		list = slices.DeleteFunc(list, func(f fault) bool {
			return slices.ContainsFunc(rows, func(r result) bool { return r.Fault == f.Name })
		})
	}
	g, err := load(o)
	if err != nil {
		return err
	}
	if check {
		return builds(o, g, list)
	}
	began := time.Now()
	var missed []string
	for i, f := range list {
		if most > 0 && time.Since(began) > most {
			fmt.Printf("%d of %d faults were not started: -budget %v is used up\n", len(list)-i, len(list), most)
			break
		}
		r, err := plant(o, g, f)
		if err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
		rows = append(rows, r)
		fmt.Printf("%-11s %-24s %s  %s  %.0f s\n", r.Outcome, r.Package, r.Fault, r.By, r.Seconds)
		if r.Outcome != "caught" && (before == "" || was[f.Name] == "caught") {
			missed = append(missed, f.Name)
		}
		if out != "" { // after each, so that a stopped run leaves its table
			if err := write(out, rows); err != nil {
				return err
			}
		}
	}
	if len(missed) > 0 {
		return fmt.Errorf("%d of %d faults were not caught: %s", len(missed), len(rows), strings.Join(missed, "; "))
	}
	fmt.Printf("%d faults: no test is missing\n", len(rows))
	return nil
}

// table reads the results that write has written.
func table(path string) (rows []result, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &rows); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return rows, nil
}

func write(path string, rows []result) error {
	text := []byte("[\n")
	for i, r := range rows {
		line, err := json.Marshal(r)
		if err != nil {
			return err
		}
		text = append(append(text, '\t'), line...)
		if i < len(rows)-1 {
			text = append(text, ',')
		}
		text = append(text, '\n')
	}
	return os.WriteFile(path, append(text, "]\n"...), 0o644)
}

// read parses all fault files of a folder.
func read(folder string) ([]fault, error) {
	paths, err := filepath.Glob(filepath.Join(folder, "*.txt"))
	if err != nil {
		return nil, err
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("no *.txt file in %s", folder)
	}
	var all []fault
	names := map[string]bool{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		part := "" // which of old and new the lines go to
		for i, line := range strings.Split(string(text), "\n") {
			wrong := func(what string) error { return fmt.Errorf("%s:%d: %s", path, i+1, what) }
			name, isName := strings.CutPrefix(line, "== ")
			switch {
			case isName:
				if names[name] {
					return nil, wrong("another fault has this name")
				}
				names[name] = true
				all, part = append(all, fault{Name: name}), "head"
			case part == "":
				if line != "" && line[0] != '#' {
					return nil, wrong("text before the first fault")
				}
			case part == "head" && strings.HasPrefix(line, "in: "):
				all[len(all)-1].In = strings.TrimSpace(line[4:])
			case line == "-- old" || line == "-- new":
				part = line[3:]
			case part == "old":
				all[len(all)-1].Old += line + "\n"
			case part == "new":
				all[len(all)-1].New += line + "\n"
			case line != "":
				return nil, wrong("expected in:, -- old or -- new")
			}
		}
	}
	for i := range all {
		f := &all[i]
		f.Old, f.New = strings.Trim(f.Old, "\n"), strings.Trim(f.New, "\n")
		if f.Old == "" || f.Old == f.New {
			return nil, fmt.Errorf("fault %q changes nothing", f.Name)
		}
	}
	return all, nil
}

// locate finds the unique place of each fault's old text.
func locate(tree string, list []fault) error {
	var wrong []error
	found := make([][]string, len(list))
	err := filepath.WalkDir(tree, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if path != tree && (name[0] == '.' || name == "testdata" || name == "build") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(tree, path)
		for i, f := range list {
			if f.In == "" || strings.HasSuffix("/"+rel, "/"+f.In) || strings.HasSuffix("/"+filepath.Dir(rel), "/"+f.In) {
				for range places(string(text), f.Old) {
					found[i] = append(found[i], rel)
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for i := range list {
		f := &list[i]
		if len(found[i]) == 1 {
			f.path, f.dir = found[i][0], filepath.ToSlash(filepath.Dir(found[i][0]))
			continue
		}
		where := "nowhere"
		if n := len(found[i]); n > 0 {
			where = fmt.Sprintf("%d times (%s)", n, strings.Join(slices.Compact(found[i]), ", "))
		}
		wrong = append(wrong, fmt.Errorf("fault %q: its old text is found %s; change the text, or its in line", f.Name, where))
	}
	return errors.Join(wrong...)
}

// places returns the [begin, end) of each occurrence of old in text. Indentation is ignored.
func places(text, old string) [][2]int {
	lines := strings.Split(old, "\n")
	for i, l := range lines {
		lines[i] = regexp.QuoteMeta(strings.TrimSpace(l))
	}
	if first := strings.Split(old, "\n")[0]; !strings.Contains(text, strings.TrimSpace(first)) {
		return nil
	}
	var all [][2]int
	for _, m := range regexp.MustCompile(strings.Join(lines, `[ \t]*\n[ \t]*`)).FindAllStringIndex(text, -1) {
		all = append(all, [2]int{m[0], m[1]})
	}
	return all
}

// imports is the graph of the module's packages by folder, tests included.
type imports struct {
	users map[string][]string // folder → folders that import it
	path  map[string]string   // folder → import path
	tests map[string]bool     // folders with tests
}

func load(o options) (*imports, error) {
	words := strings.Fields(o.command)
	cmd := exec.Command(words[0], append(words[1:], "list", "-json=Dir,ImportPath,Imports,TestImports,XTestImports,TestGoFiles,XTestGoFiles", "./...")...)
	cmd.Dir, cmd.Stderr = o.tree, os.Stderr
	text, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	type pkg struct {
		Dir, ImportPath                    string
		Imports, TestImports, XTestImports []string
		TestGoFiles, XTestGoFiles          []string
	}
	g := &imports{map[string][]string{}, map[string]string{}, map[string]bool{}}
	folder := map[string]string{}
	var all []pkg
	for dec := json.NewDecoder(bytes.NewReader(text)); ; {
		var p pkg
		if err := dec.Decode(&p); err == io.EOF {
			break
		} else if err != nil {
			return nil, err
		}
		rel, err := filepath.Rel(o.tree, p.Dir)
		if err != nil {
			return nil, err
		}
		p.Dir = filepath.ToSlash(rel)
		folder[p.ImportPath], g.path[p.Dir] = p.Dir, p.ImportPath
		g.tests[p.Dir] = len(p.TestGoFiles)+len(p.XTestGoFiles) > 0
		all = append(all, p)
	}
	for _, p := range all {
		for _, i := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
			if of, ok := folder[i]; ok && of != p.Dir && !slices.Contains(g.users[of], p.Dir) {
				g.users[of] = append(g.users[of], p.Dir)
			}
		}
	}
	return g, nil
}

// from lists the packages with tests up to depth imports above dir, nearest first. At equal
// distance, those with the most dependencies, which take longest, come last.
func (g *imports) from(dir string, depth int) []string {
	var all []string
	seen := map[string]bool{dir: true}
	for level := []string{dir}; len(level) > 0 && depth >= 0; depth-- {
		var next []string
		slices.SortStableFunc(level, func(a, b string) int { return len(g.users[b]) - len(g.users[a]) })
		for _, d := range level {
			if g.tests[d] && !strings.HasPrefix(d, "benchmarks") {
				all = append(all, d)
			}
			for _, u := range g.users[d] {
				if !seen[u] {
					seen[u], next = true, append(next, u)
				}
			}
		}
		level = next
	}
	return all
}

// builds checks that the package of each fault builds with it.
func builds(o options, g *imports, list []fault) error {
	var wrong []error
	for _, f := range list {
		env, remove, err := overlay(o, f)
		if err != nil {
			return err
		}
		var out bytes.Buffer
		if err := o.do(env, &out, "build", g.path[f.dir]); err != nil {
			wrong = append(wrong, fmt.Errorf("fault %q does not build: %s", f.Name, out.String()))
		}
		remove()
	}
	fmt.Printf("%d faults, of which %d do not build\n", len(list), len(wrong))
	return errors.Join(wrong...)
}

// overlay writes the faulty file outside the tree and returns the environment in which go builds
// with it. Through the environment it also applies to a go build that a test starts.
func overlay(o options, f fault) (env []string, remove func(), err error) {
	work, err := os.MkdirTemp("", "faults-")
	if err != nil {
		return nil, nil, err
	}
	remove = func() { os.RemoveAll(work) }
	path := filepath.Join(o.tree, f.path)
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, remove, err
	}
	at := places(string(text), f.Old)[0]
	with, list := filepath.Join(work, "with.go"), filepath.Join(work, "overlay.json")
	if err := os.WriteFile(with, slices.Concat(text[:at[0]], []byte(f.New), text[at[1]:]), 0o644); err != nil {
		return nil, remove, err
	}
	words, err := json.Marshal(map[string]map[string]string{"Replace": {path: with}})
	if err != nil {
		return nil, remove, err
	}
	if err := os.WriteFile(list, words, 0o644); err != nil {
		return nil, remove, err
	}
	return append(os.Environ(), "GOFLAGS="+strings.TrimSpace(os.Getenv("GOFLAGS")+" -overlay="+list)), remove, nil
}

// plant runs the tests of one fault.
func plant(o options, g *imports, f fault) (result, error) {
	r := result{Fault: f.Name, Package: f.dir, Outcome: "survived"}
	env, remove, err := overlay(o, f)
	if remove != nil {
		defer remove()
	}
	if err != nil {
		return r, err
	}
	began := time.Now()
	folders := o.only
	if folders == nil {
		folders = g.from(f.dir, o.depth)
	}
	for _, dir := range folders {
		if dir != f.dir && o.skip.MatchString(dir) {
			continue
		}
		var out bytes.Buffer
		if o.do(env, &out, "test", "-vet=off", "-failfast", "-run", o.tests, "-timeout", o.limit.String(), g.path[dir]) == nil {
			continue
		}
		r.Outcome, r.By = "caught", dir
		switch m := failed.FindStringSubmatch(out.String()); {
		case strings.Contains(out.String(), "panic: test timed out"):
			r.Outcome = "timeout"
		case m != nil:
			r.By += " " + m[1] + m[2]
		case strings.Contains(out.String(), "[build failed]"):
			r.Outcome = "unbuildable"
		}
		break
	}
	r.Seconds = float64(int(time.Since(began).Seconds()))
	return r, nil
}

// failed finds the first failing test, or the one that panicked or hung.
var failed = regexp.MustCompile(`(?m)^--- FAIL: (\S+)|^\s+(Test\S+) \(`)

// do runs go.
func (o options) do(env []string, out io.Writer, args ...string) error {
	words := strings.Fields(o.command)
	cmd := exec.Command(words[0], append(words[1:], args...)...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = o.tree, env, out, out
	return cmd.Run()
}
