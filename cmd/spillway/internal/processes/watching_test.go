//go:build linux

package processes

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/graph"
)

// A scrape is answered, and its connection then closes.
func TestObserversAreNotKept(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p := start(t, tinyWith("--steps", "1000000", "--metrics-addr", "0", "--checkpoint", filepath.Join(dir, "ck"))...)
	var url string
	waitFor(t, "address", func() bool {
		_, rest, found := strings.Cut(p.errs.String(), "http://")
		if found {
			url, _, _ = strings.Cut(rest, "/metrics")
		}
		return found && strings.Contains(rest, "/metrics")
	})
	for range 48 { // three times as many as are served at once
		r, err := http.Get("http://" + url + "/metrics")
		require.NoError(t, err)
		text, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		require.NoError(t, r.Body.Close())
		require.Equal(t, http.StatusOK, r.StatusCode)
		require.True(t, r.Close)
		require.Contains(t, string(text), "spillway_steps_total")
	}
	require.NoError(t, p.Process.Signal(syscall.SIGTERM))
	require.Equal(t, cli.ExitInterrupted, p.end(t), p.errs.String())
}

// scrape reads a page as Prometheus does.
func scrape(t *testing.T, url string) map[string]*dto.MetricFamily {
	t.Helper()
	r, err := http.Get(url)
	require.NoError(t, err)
	defer r.Body.Close()
	require.Equal(t, http.StatusOK, r.StatusCode)
	text, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	parser := expfmt.TextParser{}
	all, err := parser.TextToMetricFamilies(strings.NewReader(string(text)))
	require.NoError(t, err)
	return all
}

// value returns a metric of the series whose labels are all among the given ones.
func value(t *testing.T, all map[string]*dto.MetricFamily, name string, labels ...string) float64 {
	t.Helper()
	require.Contains(t, all, name)
series:
	for _, m := range all[name].Metric {
		for _, l := range m.Label {
			if !strings.Contains(strings.Join(labels, " ")+" ", l.GetName()+"="+l.GetValue()+" ") {
				continue series
			}
		}
		if m.Counter != nil {
			return m.Counter.GetValue()
		}
		return m.Gauge.GetValue()
	}
	require.Fail(t, "no such series", "%s %v", name, labels)
	return 0
}

// A run of two processes can be observed, and continues if the folder of its curves is removed.
func TestWatchingARun(t *testing.T) {
	t.Parallel()
	board := filepath.Join(t.TempDir(), "runs", "a")
	p := start(t, launched(2, tinyWith("--steps", "1000000", "--metrics-addr", "127.0.0.1:0", "--tensorboard", board)...)...)
	address := regexp.MustCompile(`metrics: (http://127\.0\.0\.1:\d+/metrics)`)
	waitFor(t, "address", func() bool { return address.MatchString(p.errs.String()) })
	url := address.FindStringSubmatch(p.errs.String())[1]
	var all map[string]*dto.MetricFamily
	waitFor(t, "steps", func() bool {
		all = scrape(t, url)
		return value(t, all, "spillway_steps_total") >= 3
	})
	steps := value(t, all, "spillway_steps_total")
	require.InDelta(t, 5.5, value(t, all, "spillway_loss"), 2)
	require.Positive(t, value(t, all, "spillway_tokens_per_second"))
	require.Zero(t, value(t, all, "spillway_skipped_steps_total"))
	require.InDelta(t, 32*steps, value(t, all, "spillway_tokens_total"), 33, "16 tokens a rank; a scrape may fall within a step's telling")
	planned, classes := value(t, all, "spillway_memory_planned_bytes", "space=device"), 0.0
	for _, m := range all["spillway_memory_planned_class_bytes"].Metric {
		for _, l := range m.Label {
			if l.GetValue() == "device" {
				classes += m.Gauge.GetValue()
			}
		}
	}
	require.Equal(t, planned, classes)
	touched := all["spillway_memory_touched_class_bytes"].Metric
	seen := 0
	for _, m := range touched {
		labels := map[string]string{}
		for _, l := range m.Label {
			labels[l.GetName()] = l.GetValue()
		}
		if labels["space"] == "device" {
			seen++
			require.Equal(t, value(t, all, "spillway_memory_planned_class_bytes", "space=device", "class="+labels["class"]), m.Gauge.GetValue(), "%v", labels)
		}
	}
	require.Equal(t, 2*int(graph.NumClasses), seen, "of both processes' ranks")
	for _, rank := range []string{"rank=0", "rank=1"} {
		require.Equal(t, planned, value(t, all, "spillway_memory_peak_bytes", rank, "space=device"), "both processes' ranks")
	}
	for _, op := range []string{"op=all_gather", "op=reduce_scatter"} {
		require.Positive(t, value(t, all, "spillway_collective_seconds_total", op))
		require.Positive(t, value(t, all, "spillway_collective_bytes_per_second", op))
		require.Zero(t, int(value(t, all, "spillway_collective_calls_total", op))%2, "each rank runs it")
	}
	overlap := value(t, all, "spillway_comm_overlap_ratio")
	require.True(t, overlap >= 0 && overlap <= 1, "%v", overlap)
	require.Positive(t, value(t, all, "process_resident_memory_bytes"))

	files, err := filepath.Glob(filepath.Join(board, "events.out.tfevents.*"))
	require.NoError(t, err)
	require.Len(t, files, 1)
	text, err := os.ReadFile(files[0])
	require.NoError(t, err)
	for _, tag := range []string{"train/loss", "speed/tokens_per_second", "comm/overlap_share", "memory/device_peak_bytes"} {
		require.Contains(t, string(text), tag)
	}
	require.NoError(t, os.RemoveAll(board))
	waitFor(t, "another step", func() bool { return value(t, scrape(t, url), "spillway_steps_total") > steps })
	require.NoError(t, p.Process.Signal(syscall.SIGINT))
	require.Equal(t, 130, p.end(t), p.errs.String())
	_, err = http.Get(url)
	require.Error(t, err, "the page ends with the run")
}

func TestMetricsAddresses(t *testing.T) {
	for asked, want := range map[string]string{"9090": "127.0.0.1:9090", ":9090": "127.0.0.1:9090", "0.0.0.0:80": "0.0.0.0:80", "[::1]:1": "[::1]:1", "host:0": "host:0"} {
		got, err := options.ListenAddress(asked)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for _, wrong := range []string{"host", "a:b", ":70000", "::1", "host:-1"} {
		got := command(tinyWith("--metrics-addr", wrong)...)
		require.Equal(t, 1, got.status)
		require.Contains(t, got.stderr, "--metrics-addr")
		require.Equal(t, 1, strings.Count(got.stderr, "\n"), got.stderr)
	}
	file := writeFile(t, "file", "")
	got := command(tinyWith("--tensorboard", file)...)
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "--tensorboard")
}
