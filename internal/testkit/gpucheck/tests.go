package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
)

// testLimit is the time limit of one test. Each test runs in its own process, so that it cannot
// affect another's GPU context or time.
var testLimit = 25 * time.Second

// onDoubles matches tests of the bundle that open no driver, or whose work other tests do.
var onDoubles = regexp.MustCompile(`^Test(EverySourceCompiles|ParametersAreTheCubins|TrainingSteps.*|Gradients.*|.*AllocateNothing|.*AllocatesNothing)$`)

// byOperation are the tests with a subtest for each kind of operation. Each subtest runs in its own
// process too.
var byOperation = map[string]func() []graph.Kind{
	"TestKernelsFollowTheCPU": optest.Everywhere,
	"TestLargeShapes": func() []graph.Kind {
		return slices.DeleteFunc(optest.Everywhere(), func(k graph.Kind) bool { return !optest.HasLarge(k) })
	},
}

// deviceTest is a test or subtest of a test binary.
type deviceTest struct{ binary, name string }

func (d deviceTest) log() string {
	return "test-" + strings.TrimSuffix(filepath.Base(d.binary), ".test") + "-" + strings.ReplaceAll(d.name, "/", "-")
}

// pattern returns the regular expression that selects only this test.
func (d deviceTest) pattern() string {
	parts := strings.Split(d.name, "/")
	for i, p := range parts {
		parts[i] = "^" + regexp.QuoteMeta(p) + "$"
	}
	return strings.Join(parts, "/")
}

// listTests lists the tests of the test binaries.
func (b *bundle) listTests(ctx context.Context, r *result) (list []deviceTest) {
	binaries, err := filepath.Glob(filepath.Join(b.dir, "tests", "*.test"))
	if err != nil || len(binaries) == 0 {
		r.fail("the bundle has no tests")
		return nil
	}
	for _, path := range binaries {
		o := b.within(ctx, testLimit, "list-"+filepath.Base(path), b.work, nil, path, "-test.list=.")
		if o.status != 0 {
			r.fail("%s does not list its tests: %s", filepath.Base(path), o.ended())
			continue
		}
		for _, name := range strings.Fields(string(o.out)) {
			if !strings.HasPrefix(name, "Test") || onDoubles.MatchString(name) {
				continue
			}
			if kinds := byOperation[name]; kinds != nil {
				for _, kind := range kinds() {
					list = append(list, deviceTest{path, name + "/" + string(kind)})
				}
				continue
			}
			list = append(list, deviceTest{path, name})
		}
	}
	return list
}

// runTests runs each test in its own process. Failed tests run once more, alone and with
// synchronous launches, so that an error names the right kernel.
func runTests(ctx context.Context, b *bundle, r *result) {
	r.Table = [][]string{{"test", "outcome", "seconds", "said"}}
	passedTests, skippedTests := 0, 0
	var again []deviceTest
	list := b.listTests(ctx, r)
	outcomes := inParallel(list, func(d deviceTest) *outcome { return b.runTest(ctx, d, d.log(), nil) })
	for i, d := range list {
		o := outcomes[i]
		switch {
		case o == nil || ctx.Err() != nil && o.late: // the part's time, or a signal
			r.say("%s: was not run to its end", d.name)
		case o.status == 0 && strings.Contains(string(o.out), "--- SKIP: "+d.name):
			skippedTests++
		case o.status == 0:
			passedTests++
		default:
			again = append(again, d)
			r.fail("%s: %s (logs/%s.txt)", d.name, shorten(o.ended(), 300), d.log())
			r.Table = append(r.Table, []string{d.name, verdictOf(o), fmt.Sprintf("%.1f", o.took.Seconds()), said(o)})
		}
	}
	r.say("%d tests passed, %d were skipped, %d failed", passedTests, skippedTests, len(again))
	for _, d := range again {
		if ctx.Err() != nil {
			return
		}
		o := b.runTest(ctx, d, d.log()+"-again", []string{"CUDA_LAUNCH_BLOCKING=1"})
		r.Table = append(r.Table, []string{d.name + ", alone again", verdictOf(o), fmt.Sprintf("%.1f", o.took.Seconds()), said(o)})
	}
}

// atOnce is the number of processes that use the GPU concurrently.
const atOnce = 14

// inParallel runs f on each element, atOnce at a time, and returns the results in order.
func inParallel[T, R any](list []T, f func(T) R) []R {
	results := make([]R, len(list))
	places := make(chan struct{}, atOnce)
	var all sync.WaitGroup
	for i := range list {
		places <- struct{}{}
		all.Go(func() {
			results[i] = f(list[i])
			<-places
		})
	}
	all.Wait()
	return results
}

func (b *bundle) runTest(ctx context.Context, d deviceTest, log string, env []string) *outcome {
	if b.gpu != nil {
		env = append(env, "SPILLWAY_TEST_GPU=1")
	}
	dir := strings.TrimSuffix(d.binary, ".test") // its test data
	if _, err := os.Stat(dir); err != nil {
		dir = b.work
	}
	return b.within(ctx, testLimit, log, dir, env, d.binary, "-test.v", "-test.run="+d.pattern(), "-test.timeout=0")
}

func verdictOf(o *outcome) string {
	switch {
	case o.late:
		return "hangs"
	case o.status == 0:
		return passed
	}
	return failedStatus
}

// faults are what a failing test says that is worth a line of the page, the best first.
var faults = []*regexp.Regexp{regexp.MustCompile(`(?m)^.*(CUDA_ERROR|CUBLAS_STATUS|differs|panic:).*$`), regexp.MustCompile(`(?m)^.*(Error:\s|want ).*$`)}

func said(o *outcome) string {
	line := ""
	for _, f := range faults {
		if line = f.FindString(string(o.out) + string(o.err)); line != "" {
			break
		}
	}
	return shorten(strings.ReplaceAll(strings.Join(strings.Fields(line), " "), "|", "/"), 160)
}

const cutMark = " …"

func shorten(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n]) + cutMark
	}
	return s
}
