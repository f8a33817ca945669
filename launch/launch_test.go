//go:build linux

package launch

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// shell runs a shell script as every rank; it returns the end, stdout and stderr.
func shell(t *testing.T, o Options, script string, signals <-chan os.Signal) (End, string, string) {
	var out, errs bytes.Buffer
	o.Program, o.Args, o.Stdout, o.Stderr = "/bin/sh", []string{"-c", script}, &out, &errs
	end, err := Run(context.Background(), o, signals)
	require.NoError(t, err)
	return end, out.String(), errs.String()
}

func TestTheMergedLog(t *testing.T) {
	end, out, errs := shell(t, Options{Ranks: 3}, `echo "out $SPILLWAY_RANK of $SPILLWAY_WORLD_SIZE"; printf "err" >&2`, nil)
	require.Equal(t, End{}, end)
	require.Equal(t, "out 0 of 3\n", out)
	for _, want := range []string{"[rank 1] out 1 of 3", "[rank 2] out 2 of 3", "[rank 1] ", "[rank 2] "} {
		require.Contains(t, errs, want)
	}
	require.Equal(t, 3, strings.Count(errs, "err"), errs)
}

// TestCrashesOfRanks checks that ranks run with GOTRACEBACK=crash unless the user has set it.
// Without it, a crash of the Go runtime would exit with status 2.
func TestCrashesOfRanks(t *testing.T) {
	t.Setenv("GOTRACEBACK", "all")
	_, out, _ := shell(t, Options{Ranks: 1}, `echo $GOTRACEBACK`, nil)
	require.Equal(t, "all\n", out)
	require.NoError(t, os.Unsetenv("GOTRACEBACK"))
	_, out, errs := shell(t, Options{Ranks: 2}, `echo $GOTRACEBACK`, nil)
	require.Equal(t, "crash\n", out)
	require.Equal(t, "[rank 1] crash\n", errs)
}

// TestTheOrderOfRankZero checks that stdout and stderr of rank 0 keep their order when both go to
// one file.
func TestTheOrderOfRankZero(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "log"))
	require.NoError(t, err)
	defer f.Close()
	o := Options{Ranks: 2, Program: "/bin/sh", Args: []string{"-c", `[ $SPILLWAY_RANK = 1 ] && exit; for i in 1 2 3 4 5 6 7 8; do echo $i; echo $i >&2; done`}, Stdout: f, Stderr: f}
	_, err = Run(context.Background(), o, nil)
	require.NoError(t, err)
	text, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.Equal(t, "1\n1\n2\n2\n3\n3\n4\n4\n5\n5\n6\n6\n7\n7\n8\n8\n", string(text))
}

func TestHowAJobEnds(t *testing.T) {
	for _, c := range []struct {
		script string
		status int
		lost   string
	}{
		{"exit 0", 0, ""}, {"exit 2", 2, ""},
		{`exit $SPILLWAY_RANK`, LostStatus, ""},                 // rank 0 exits with 0 and does not report the failure
		{`[ $SPILLWAY_RANK = 0 ] && exit 130; exit 3`, 130, ""}, // the status of rank 0 has priority
		{`[ $SPILLWAY_RANK = 1 ] && kill -9 $$; exit 0`, LostStatus, "rank 1"},
		{`[ $SPILLWAY_RANK = 0 ] && kill -SEGV $$; exit 0`, LostStatus, "rank 0"},
	} {
		end, _, _ := shell(t, Options{Ranks: 2}, c.script, nil)
		require.Equal(t, c.status, end.Status, c.script)
		if c.lost == "" {
			require.Empty(t, end.Lost)
		} else {
			require.Contains(t, end.Lost, c.lost+" (process ")
		}
	}
}

func TestWhoDoesNotEndIsKilled(t *testing.T) {
	end, _, _ := shell(t, Options{Ranks: 2, Grace: 50 * time.Millisecond}, `[ $SPILLWAY_RANK = 1 ] && exec sleep 1000; exit 0`, nil)
	require.Equal(t, LostStatus, end.Status)
	require.Equal(t, "1 rank did not end within 50ms of the first", end.Lost)
	require.Regexp(t, `rank 1 \(process [1-9]\d*, not started\)`, end.Flight)
}

// TestAStoppedRankEndsWithTheJob checks that a failed job continues a rank that is stopped
// (SIGSTOP), so that the rank exits without being killed.
func TestAStoppedRankEndsWithTheJob(t *testing.T) {
	pid := filepath.Join(t.TempDir(), "pid")
	end, _, errs := shell(t, Options{Ranks: 2, Grace: time.Minute}, fmt.Sprintf(`
if [ $SPILLWAY_RANK = 1 ]; then echo $$ > %[1]s.new; mv %[1]s.new %[1]s; kill -STOP $$; echo "goes on"; exit 3; fi
while [ "$state" != T ]; do sleep 0.01; [ -e %[1]s ] && read -r _ _ state _ < /proc/$(cat %[1]s)/stat; done
exit 3`, pid), nil)
	require.Equal(t, LostStatus, end.Status)
	require.Empty(t, end.Lost, "nobody was killed")
	require.Contains(t, errs, "goes on")
}

func TestSignalsGoToRankZero(t *testing.T) {
	ready := filepath.Join(t.TempDir(), "ready")
	signals := make(chan os.Signal, 1)
	go func() {
		for {
			if _, err := os.Stat(ready); err == nil {
				signals <- syscall.SIGTERM
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	end, _, _ := shell(t, Options{Ranks: 2, Grace: time.Minute},
		`if [ $SPILLWAY_RANK = 1 ]; then exit 0; fi; trap "exit 130" TERM; touch `+ready+`; while :; do sleep 0.01; done`, signals)
	require.Equal(t, End{Status: 130}, end)
}

func TestSharesOfProcessors(t *testing.T) {
	o := Options{Ranks: 3, CPUs: []int{0, 1, 2, 3, 4, 5, 6, 7}}
	require.Equal(t, [][]int{{0, 1}, {2, 3, 4}, {5, 6, 7}}, [][]int{o.share(0), o.share(1), o.share(2)})
	require.Equal(t, 2, o.threads(8))
	o.CPUs = o.CPUs[:2]
	require.Nil(t, o.share(0), "ranks that outnumber the processors are not bound")
	require.Equal(t, 1, o.threads(2))
}

func TestRefusals(t *testing.T) {
	_, err := Run(context.Background(), Options{}, nil)
	require.EqualError(t, err, "-n 0: at least 1 rank is needed")
	_, err = Run(context.Background(), Options{Ranks: 2, Program: "/nowhere/at/all"}, nil)
	require.ErrorContains(t, err, "launch: rank 0")
}
