// Command same runs the commands of commands.txt with two builds of spillway and compares exit
// status, standard output, JSON, metrics, and written files.
//
//	go run ./benchmarks/same -a OLD/spillway -b NEW/spillway [-only REGEXP]
//
// Each group of commands runs in a separate folder, with the repository's testdata and examples
// beside it. Measured times are left out. Errors and other messages on standard error are compared
// only with -text. The exit status is 1 if there is a difference.
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

//go:embed commands.txt
var commands string

type options struct {
	a, b, root string
	only       *regexp.Regexp
	text       bool
	limit      time.Duration
}

func main() {
	var o options
	only := flag.String("only", "", "run the groups whose heading this `REGEXP` matches")
	flag.StringVar(&o.a, "a", "", "the older binary")
	flag.StringVar(&o.b, "b", "", "the newer binary")
	flag.StringVar(&o.root, "root", ".", "the repository, whose testdata and examples commands read")
	flag.BoolVar(&o.text, "text", false, "compare standard error too")
	flag.DurationVar(&o.limit, "limit", 5*time.Minute, "end a command after this time")
	flag.Parse()
	var err error
	if o.only, err = regexp.Compile(*only); err == nil {
		err = compare(o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "same:", err)
		os.Exit(1)
	}
}

// group is a list of commands that run one after the other in one folder.
type group struct {
	heading  string
	commands []string
}

// groups reads the list. A line "# heading" begins a group; {a|b} means one command with each.
func groups(text string) (list []group) {
	for line := range strings.Lines(text) {
		switch line = strings.TrimSpace(line); {
		case line == "" || strings.HasPrefix(line, "//"):
		case strings.HasPrefix(line, "# "):
			list = append(list, group{heading: line[2:]})
		default:
			g := &list[len(list)-1]
			g.commands = append(g.commands, expand(line)...)
		}
	}
	return list
}

// expand returns a command for each choice in the line's braces.
func expand(line string) []string {
	before, rest, ok := strings.Cut(line, "{")
	if !ok {
		return []string{line}
	}
	choices, after, _ := strings.Cut(rest, "}")
	var list []string
	for _, choice := range strings.Split(choices, "|") {
		list = append(list, expand(before+choice+after)...)
	}
	return list
}

func compare(o options) error {
	for _, path := range []*string{&o.a, &o.b, &o.root} {
		if *path == "" {
			return errors.New("-a and -b are needed: the two binaries")
		}
		abs, err := filepath.Abs(*path)
		if err != nil {
			return err
		}
		*path = abs
	}
	ran, differ := 0, 0
	for _, g := range groups(commands) {
		if !o.only.MatchString(g.heading) {
			continue
		}
		a, err := o.run(o.a, g)
		if err != nil {
			return err
		}
		b, err := o.run(o.b, g)
		if err != nil {
			return err
		}
		for i, command := range g.commands {
			ran++
			if diff := o.differences(a[i], b[i]); len(diff) > 0 {
				differ++
				fmt.Printf("%s: %s\n\t%s\n", g.heading, command, strings.Join(diff, "\n\t"))
			}
		}
	}
	fmt.Printf("%d commands, %d differ\n", ran, differ)
	switch {
	case ran == 0:
		return errors.New("-only matches no group")
	case differ > 0:
		return fmt.Errorf("%d of %d commands differ", differ, ran)
	}
	return nil
}

// outcome is the result of a command. files are the files of its folder that it wrote or removed.
type outcome struct {
	status         int
	stdout, stderr string
	files          map[string]string
}

// run runs a group with a separate folder and home. Their names are the same for both binaries, so
// that messages with these names are equal.
func (o options) run(binary string, g group) (list []outcome, err error) {
	base := filepath.Join(os.TempDir(), "spillway-same")
	if err := os.RemoveAll(base); err != nil {
		return nil, err
	}
	dir, home := filepath.Join(base, "work"), filepath.Join(base, "home")
	for _, d := range []string{dir, home} {
		if err := os.MkdirAll(d, 0o777); err != nil {
			return nil, err
		}
	}
	defer func() { err = errors.Join(err, os.RemoveAll(base)) }()
	for _, name := range []string{"testdata", "examples"} {
		if err := os.Symlink(filepath.Join(o.root, name), filepath.Join(dir, name)); err != nil {
			return nil, err
		}
	}
	left := map[string]string{} // files after the previous command
	for _, command := range g.commands {
		ctx, cancel := context.WithTimeout(context.Background(), o.limit)
		cmd := exec.CommandContext(ctx, "/bin/sh", "-c", strings.ReplaceAll(command, "spillway ", binary+" "))
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "HOME="+home, "XDG_CONFIG_HOME="+home, "XDG_CACHE_HOME="+home, "COLUMNS=100", "NO_COLOR=1")
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		err := cmd.Run()
		cancel()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			return nil, fmt.Errorf("%s: %w", command, err)
		}
		out := outcome{status: cmd.ProcessState.ExitCode(), stdout: untimed(stdout.String()), stderr: untimed(stderr.String()), files: map[string]string{}}
		now, err := contents(dir)
		if err != nil {
			return nil, err
		}
		for name, text := range now {
			if left[name] == text {
				continue
			}
			out.files[name] = text
		}
		for name := range left {
			if _, ok := now[name]; !ok {
				out.files[name] = "removed"
			}
		}
		left = now
		list = append(list, out)
	}
	return list, nil
}

// measured are figures that differ between any two runs, and names that are drawn or come from a
// clock.
var measured = []struct{ find, put string }{
	{`"(seconds|tokens_per_s|step_seconds_median|id|key|owner|written)": ?("[^"]*"|[0-9.e+-]+)`, `"$1": …`},
	{`(?s)"step_seconds": \[.*?\]`, `"step_seconds": […]`},
	{`[0-9][0-9.,]* ?(ms|µs|tok/s|tokens/s|steps/s|[kMG]?B/s|s\b|min\b)`, "…"},
	{`\d{4}-\d\d-\d\dT[0-9:]+Z +([0-9.]+ [KMG]?i?B) +[0-9a-f]{8}`, "… $1"},
	{`(?m)^  "crc32c": "[0-9a-f]{8}"$`, `  "crc32c": …`}, // checksum of the manifest's text
	{`(?m)^[0-9a-f]{8} (\{"event")`, "$1"},
	{`(\.(writing|removing)-[a-z0-9-]*-)[0-9a-f]{32}`, "$1…"},
}

// untimed removes measured figures from a text.
func untimed(s string) string {
	for _, m := range measured {
		s = regexp.MustCompile(m.find).ReplaceAllString(s, m.put)
	}
	return s
}

// contents returns the files of a folder: short texts without measured figures, others as size and
// hash.
func contents(dir string) (map[string]string, error) {
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if utf8.Valid(text) {
			text = []byte(untimed(string(text)))
		}
		if len(text) > 1<<16 || !utf8.Valid(text) {
			sum := sha256.Sum256(text)
			text = fmt.Appendf(nil, "%d bytes, SHA-256 %s", len(text), hex.EncodeToString(sum[:]))
		}
		files[name] = string(text)
		return err
	})
	return files, err
}

// differences returns lines that describe how two outcomes differ.
func (o options) differences(a, b outcome) (list []string) {
	if a.status != b.status {
		list = append(list, fmt.Sprintf("status %d, was %d: %s", b.status, a.status, firstLine(b.stderr)))
	}
	if a.stdout != b.stdout {
		list = append(list, "stdout: "+firstDifference(a.stdout, b.stdout))
	}
	if o.text && a.stderr != b.stderr {
		list = append(list, "stderr: "+firstDifference(a.stderr, b.stderr))
	}
	names := map[string]bool{}
	for name := range a.files {
		names[name] = true
	}
	for name := range b.files {
		names[name] = true
	}
	for name := range names {
		was, had := a.files[name]
		is, has := b.files[name]
		switch {
		case !has:
			list = append(list, name+" is missing")
		case !had:
			list = append(list, name+" is new")
		case was != is:
			list = append(list, name+": "+firstDifference(was, is))
		}
	}
	slices.Sort(list)
	return list
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// firstDifference returns the first line that differs, from both texts.
func firstDifference(a, b string) string {
	as, bs := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range max(len(as), len(bs)) {
		var x, y string
		if i < len(as) {
			x = as[i]
		}
		if i < len(bs) {
			y = bs[i]
		}
		if x != y {
			at := 0
			for at < min(len(x), len(y)) && x[at] == y[at] {
				at++
			}
			from := max(0, at-40)
			return fmt.Sprintf("line %d: %.160q, was %.160q", i+1, y[from:], x[from:])
		}
	}
	return "nothing"
}
