package main

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/graph"
)

// sanitizerTools are compute-sanitizer's, in the order of what they find.
var sanitizerTools = []string{"memcheck", "racecheck", "synccheck", "initcheck"}

// sanitized are the tests to run under the sanitizer. They cover only this project's kernels: the
// library's products are slow, and are NVIDIA's to test.
var sanitized = func() (list []string) {
	for _, k := range []graph.Kind{graph.Attention, graph.AttentionGrad, graph.LayerNormGrad, graph.BiasGrad, "adamw", graph.SqSum, graph.EmbedGrad} {
		list = append(list, "TestKernelsFollowTheCPU/"+string(k))
	}
	return append(list, "TestFlashFollowsTheCPU", "TestRankSum")
}()

// sanitizerLimit is the time limit of one test under one tool, which makes a kernel 10 to 100 times
// slower.
var sanitizerLimit = 20 * time.Second

// findingStatus is the exit status that compute-sanitizer is told to use for findings.
const findingStatus = 77

// findings is the result of a run under compute-sanitizer.
type findings struct {
	errors, warnings int
	first            string // the first finding and where it was; empty: none was printed
	whole            bool   // it printed its summary
}

var (
	errorSummary = regexp.MustCompile(`(?m)^=+ ERROR SUMMARY: (\d+) errors?`)
	raceSummary  = regexp.MustCompile(`(?m)^=+ RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)`)
	// A finding starts at the left margin; its frames and details are indented.
	findingHead = regexp.MustCompile(`^=+ ((?:Error: |Warning: |Invalid |Misaligned |Uninitialized |Unused |Barrier error|Program hit |Race reported|Potential |Fatal |Internal |Unspecified |Out-of-|Illegal |Stack overflow|Divergent |Missing ).*)$`)
	findingAt   = regexp.MustCompile(`^=+\s{2,}(at .*)$`)
)

// readSanitizer parses compute-sanitizer's output among a program's own lines.
func readSanitizer(text string) findings {
	var f findings
	if m := raceSummary.FindStringSubmatch(text); m != nil {
		f.errors, f.warnings, f.whole = count(m[1]), count(m[2]), true
	}
	if m := errorSummary.FindStringSubmatch(text); m != nil {
		f.errors, f.whole = max(f.errors, count(m[1])), true
	}
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		if f.first == "" {
			if m := findingHead.FindStringSubmatch(line); m != nil {
				f.first = m[1]
			}
		} else if m := findingAt.FindStringSubmatch(line); m != nil {
			f.first += " " + m[1]
			break
		}
	}
	return f
}

// count parses digits; a number that does not fit becomes a large one.
func count(digits string) int {
	n, err := strconv.Atoi(digits)
	if err != nil {
		return 1 << 30
	}
	return n
}

// runSanitizers runs kernels' tests under compute-sanitizer, with one process for each tool and
// test.
func runSanitizers(ctx context.Context, b *bundle, r *result) {
	if b.gpu == nil {
		r.skip("on the CPU there are no kernels to look into")
		return
	}
	program := r.tool("compute-sanitizer")
	if program == "" {
		r.skip("no kernel was looked into for memory errors or races")
		return
	}
	r.Table = [][]string{{"tool", "tests", "clean", "errors", "warnings", "the first"}}
	for _, tool := range sanitizerTools {
		b.sanitize(ctx, r, program, tool)
	}
}

// sanitize runs the tests under one tool and adds its row.
func (b *bundle) sanitize(ctx context.Context, r *result, program, tool string) {
	var total findings
	ran, clean := 0, 0
	for _, test := range sanitized {
		if ctx.Err() != nil {
			break
		}
		d := deviceTest{b.program(filepath.Join("tests", "kernels_cuda.test")), test}
		log := "sanitizer-" + tool + "-" + strings.ReplaceAll(test, "/", "-")
		o := b.within(ctx, sanitizerLimit, log, b.work, []string{"SPILLWAY_TEST_GPU=1"}, program,
			"--tool", tool, "--error-exitcode", number(findingStatus), "--print-limit", "20", "--target-processes", "all",
			d.binary, "-test.v", "-test.run="+d.pattern(), "-test.timeout=0")
		ran++
		f := readSanitizer(string(o.out) + "\n" + string(o.err))
		total.errors, total.warnings = total.errors+f.errors, total.warnings+f.warnings
		if total.first == "" && f.first != "" {
			total.first = test + ": " + f.first
		}
		switch {
		case f.errors > 0:
			r.fail("%s, %s: %d errors, first: %s (logs/%s.txt)", tool, test, f.errors, shorten(f.first, 200), log)
		case o.late:
			r.fail("%s, %s: %s (logs/%s.txt)", tool, test, o.ended(), log)
		case o.status != 0:
			r.fail("%s, %s: no error found, but it %s (logs/%s.txt)", tool, test, shorten(o.ended(), 200), log)
		case !f.whole:
			r.fail("%s, %s: it printed no summary (logs/%s.txt)", tool, test, log)
		case strings.Contains(string(o.out), "--- SKIP: "+test):
			r.say("%s, %s: the test was skipped", tool, test)
		default:
			clean++
		}
	}
	if ran < len(sanitized) {
		r.say("%s: no time was left for %d of %d tests", tool, len(sanitized)-ran, len(sanitized))
	}
	r.Table = append(r.Table, []string{tool, number(ran), number(clean), number(total.errors), number(total.warnings), shorten(cell(total.first), 200)})
}

// cell returns a text in the form that a table can contain.
func cell(s string) string {
	return strings.ReplaceAll(strings.Join(strings.Fields(s), " "), "|", "/")
}

// ratio formats a percentage.
func ratio(v float64) string { return fmt.Sprintf("%.1f", v) }
