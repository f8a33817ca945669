package train

import (
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm/shm"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/job"
)

// oneHost is the transport of a process of a job. In these tests all processes of the job are one.
type oneHost struct{ job *shm.Job }

func (s oneHost) Join(mesh []graph.Axis, local []int, timeout time.Duration, warn func(string)) (platform.Joined, error) {
	return s.job.Join(mesh, local, shm.Options{Timeout: timeout, Warn: warn})
}

// sharedMemory returns the shared memory of a job, attached once per process.
func sharedMemory(t testing.TB, processes int) (list []*shm.Job) {
	t.Helper()
	made, err := shm.Create(processes)
	require.NoError(t, err)
	for range processes {
		var files []*os.File
		for _, f := range made.Files() {
			fd, err := syscall.Dup(int(f.Fd()))
			require.NoError(t, err)
			files = append(files, os.NewFile(uintptr(fd), "shared memory"))
		}
		j, err := shm.Attach(files)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, j.Close()) })
		list = append(list, j)
	}
	require.NoError(t, made.Close())
	return list
}

// joined returns the processes of a job; the first leads and has a stream to each other one.
func joined(t testing.TB, processes int) (leader *job.Job, others []*job.Job) {
	t.Helper()
	memory := sharedMemory(t, processes)
	leader = &job.Job{Processes: processes, Locals: processes, Transport: oneHost{memory[0]}}
	for i := 1; i < processes; i++ {
		here, there := net.Pipe()
		leader.Links = append(leader.Links, run.NewLink(i, here))
		others = append(others, &job.Job{Process: i, Processes: processes, Locals: processes, Local: i, Transport: oneHost{memory[i]}, Links: []*run.Link{run.NewLink(0, there)}})
	}
	return leader, others
}

// overProcesses runs c as a job of the given numbers of processes and of ranks per process.
func overProcesses(t *testing.T, c request, processes, each int, run func(testing.TB, request) outcome) outcome {
	t.Helper()
	leader, others := joined(t, processes)
	ends := make(chan error)
	for _, j := range others {
		go func() {
			_, err := Work(context.Background(), j, nil)
			ends <- err
		}()
	}
	c.LocalRanks = each
	c.Config = c.Config.Over(leader)
	require.Equal(t, processes*each, c.Ranks)
	o := run(t, c)
	for range others {
		require.NoError(t, <-ends)
	}
	return o
}

// TestProcessesOfSeveralRanks checks that processes of several ranks give the bits, peaks and
// traffic of one process. Each form must resume from the other's checkpoint.
func TestProcessesOfSeveralRanks(t *testing.T) {
	for _, c := range []struct {
		processes, each int
		change          func(*request)
	}{
		{2, 2, func(c *request) { c.Zero = 3 }},
		{2, 3, func(c *request) { c.Zero, c.ShardSize, c.Accum, c.Clip = 2, 3, 2, 1 }},
		{3, 2, func(c *request) { c.Zero, c.ShardSize, c.Collectives = 1, 2, "tree" }},
		{2, 2, func(c *request) {
			c.Recompute, c.Disk, c.Offload = "full", t.TempDir(), "optimizer=disk,activations=host"
		}},
	} {
		cfg := tiny("gpt2")
		cfg.Batch, cfg.Seq, cfg.Steps, cfg.Checkpoint = 1, 16, 2, scratch(t)
		c.change(&cfg)
		one := cfg
		one.Ranks, one.Checkpoint = c.processes*c.each, scratch(t)
		how := runOf
		if cfg.ShardSize > 0 {
			how = runMesh
		}
		require.Equal(t, how(t, one), overProcesses(t, cfg, c.processes, c.each, how))

		cfg.Steps, cfg.Resume, one.Steps, one.Resume = 3, true, 3, true
		one.Checkpoint, cfg.Checkpoint = cfg.Checkpoint, one.Checkpoint // each resumes from the other's checkpoint
		require.Equal(t, how(t, one), overProcesses(t, cfg, c.processes, c.each, how))
	}
}

// start leads a job of two processes and returns its error; says changes the second process's
// Hello.
func start(t *testing.T, says func(*run.Hello)) error {
	t.Helper()
	leader, others := joined(t, 2)
	told := make(chan error, 1)
	go func() {
		h := others[0].Hello()
		says(&h)
		task, err := others[0].Links[0].Greet(h, func(string, *run.Hello) {})
		if err == nil && (task.Config != nil || task.Err == "") {
			err = errors.New("it is not told that there is nothing to run")
		}
		told <- err
		_ = others[0].Links[0].Close()
	}()
	c := tiny("gpt2")
	c.Config = c.Config.Over(leader)
	tr, err := c.start(context.Background())
	if tr != nil {
		require.NoError(t, tr.Close())
	}
	leader.Dismiss(err)
	require.NoError(t, <-told, "the leader is not lost")
	return err
}

// TestProcessesThatDiffer checks that processes of different builds are refused, and that the error
// shows the difference.
func TestProcessesThatDiffer(t *testing.T) {
	for words, says := range map[string]func(*run.Hello){
		"(host elsewhere) build of-old": func(h *run.Hello) { h.Build = "of-old" },
	} {
		err := start(t, func(h *run.Hello) { h.Host = "elsewhere"; says(h) })
		require.ErrorContains(t, err, "the processes of a job must be alike: rank 0 (host ")
		require.ErrorContains(t, err, "rank 1 "+words)
	}
}

// TestTheLeastMemoryOfAllHosts checks that the host with the least memory per rank refuses a run
// that is too large, before any rank starts.
func TestTheLeastMemoryOfAllHosts(t *testing.T) {
	err := start(t, func(h *run.Hello) { h.Host, h.Memory, h.LocalRanks, h.LocalRank = "small", 1<<20, 1, 0 })
	var small *MachineTooSmall
	require.ErrorAs(t, err, &small)
	require.Equal(t, "small", small.Host)
	require.EqualValues(t, 1, small.Ranks)
	require.ErrorContains(t, err, "1 rank on host small plan ")
}

// hears returns c for a job of two processes, after the leader has received the second's Hello with
// the given resources.
func hears(t *testing.T, c request, says run.Hello) request {
	t.Helper()
	leader, others := joined(t, 2)
	told := make(chan bool)
	go func() {
		defer close(told)
		h := others[0].Hello()
		h.Host, h.LocalRanks, h.LocalRank, h.Memory = "small", 1, 0, says.Memory
		_, _ = others[0].Links[0].Greet(h, func(_ string, h *run.Hello) { h.Disk = says.Disk }) // until it is released
		_ = others[0].Links[0].Close()
	}()
	c.Config = c.Config.Over(leader)
	var err error
	c.Config, err = job.Greet(c.Config)
	require.NoError(t, err)
	t.Cleanup(func() {
		leader.Dismiss(nil)
		<-told
	})
	return c
}

// TestFitWithinTheLeastOfAllHosts checks that a search stays within the memory per rank of the
// smallest host. Without that limit it selects a plan that needs more.
func TestFitWithinTheLeastOfAllHosts(t *testing.T) {
	given := planner.Fixed{Zero: true, Prefetch: true}
	c := tiny("gpt2")
	c.Zero, c.Ranks, c.Batch, c.Seq = 3, 2, 8, 32
	here := func(c request) (*planner.Fitted, int64) {
		f, err := FitHere(t.Context(), c.Config, given, 0, briefly(1))
		require.NoError(t, err)
		return f, planner.InMemory(f.Plan, []graph.Space{graph.Device, graph.Host})
	}
	wide, needs := here(hears(t, c, run.Hello{Memory: 1 << 40}))
	require.Zero(t, wide.Caps)
	share := needs - 200<<10
	tight, less := here(hears(t, c, run.Hello{Memory: share}))
	require.LessOrEqual(t, less, share)
	require.NotEqual(t, wide.Choices, tight.Choices)
	require.LessOrEqual(t, tight.Caps[graph.Device]+tight.Caps[graph.Host], share)
	require.Contains(t, tight.Reasons[len(tight.Reasons)-1], "of host small for 1 rank; the fastest without that limit takes ")

	_, err := FitHere(t.Context(), hears(t, c, run.Hello{Memory: 1 << 20}).Config, given, 0, briefly(1))
	var none *planner.NothingFits
	require.ErrorAs(t, err, &none)
	require.ErrorContains(t, err, "device and host memory come out of one, 1.00 MiB of host small for 1 rank")
}

// TestWhatFitsTheLeastOfAllHosts checks the refusal of a run that a host's memory cannot hold. It
// must name a configuration that fits, even if disk buffers need more than half of the host memory.
func TestWhatFitsTheLeastOfAllHosts(t *testing.T) {
	folder := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(folder, "config.json"),
		[]byte(`{"model_type":"gpt2","n_layer":10,"n_head":2,"n_embd":256,"vocab_size":257,"n_positions":64}`), 0o600))
	c := tiny("gpt2")
	c.Model, c.Init, c.Batch, c.Seq, c.poison = folder, "random", 2, 16, false
	c.Tokenizer, c.Data = "bytes", "../testdata/text.txt"
	c.Disk = t.TempDir()
	const memory = 66 << 20
	_, err := hears(t, c, run.Hello{Memory: memory, Disk: 1 << 30}).start(t.Context())
	var small *MachineTooSmall
	require.ErrorAs(t, err, &small)
	var refused *planner.Refusal
	require.ErrorAs(t, err, &refused)
	way := refused.Ways[0]
	require.Contains(t, way.Changes.String(), "=disk")
	require.Greater(t, planner.InMemory(way.Forecast.Plan, []graph.Space{graph.Host}), int64(memory/2))
	require.LessOrEqual(t, planner.InMemory(way.Forecast.Plan, []graph.Space{graph.Device, graph.Host}), int64(memory))
}

// TestTheLeastDiskOfAllHosts checks that the disk tier's cap is the space on the host with the
// least free disk, unless a smaller cap is set.
func TestTheLeastDiskOfAllHosts(t *testing.T) {
	c := tiny("gpt2")
	c.Disk, c.Offload = t.TempDir(), "optimizer=disk"
	require.EqualValues(t, 1000, hears(t, c, run.Hello{Disk: 1000}).DiskMemory)
	c.DiskMemory = 10
	require.EqualValues(t, 10, hears(t, c, run.Hello{Disk: 1000}).DiskMemory, "a cap that was asked for")
	c.DiskMemory = 0
	_, err := hears(t, c, run.Hello{Disk: 1000}).start(context.Background())
	require.ErrorContains(t, err, "free in Config.Disk "+c.Disk+" are 1000 B of host small for 1 rank")
	var refused *plan.DoesNotFit
	require.ErrorAs(t, err, &refused)
}

// TestAFolderThatOneProcessCannotUse checks that a disk folder that one process cannot use refuses
// the job before any process starts. It is not reported as a lost rank. The process at fault ends
// with the reason; if that is the leader, the others end without an error.
func TestAFolderThatOneProcessCannotUse(t *testing.T) {
	notAFolder := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(notAFolder, nil, 0o600))
	for rank := range 2 {
		leader, others := joined(t, 3)
		c := tiny("gpt2")
		c.Offload, c.Disk = "optimizer=disk", t.TempDir()
		other := c.Config
		if rank == 0 {
			c.Disk = notAFolder
		} else {
			other.Disk = notAFolder
		}
		ends := make(chan error, len(others))
		for i, j := range others {
			asked := other
			if i > 0 {
				asked.Disk = t.TempDir()
			}
			j.Asked = &asked
			go func() {
				began, err := Work(context.Background(), j, nil)
				if began {
					err = errors.Join(err, errors.New("it has begun"))
				}
				ends <- err
			}()
		}
		c.Config = c.Config.Over(leader)
		_, err := c.start(t.Context())
		require.ErrorContains(t, err, "Config.Disk "+notAFolder+": disk tier: "+notAFolder+" is not a folder")
		require.Equal(t, rank > 0, strings.HasPrefix(err.Error(), "rank 1 (host "), err)
		for range others {
			if end := <-ends; rank > 0 {
				require.EqualError(t, end, err.Error())
			} else {
				require.NoError(t, end)
			}
		}
	}
}

// TestTheTraceOfProcesses checks that a trace has the ranks of all processes on one clock.
// Prefetched gathers must overlap computation.
func TestTheTraceOfProcesses(t *testing.T) {
	cfg := tiny("gpt2")
	cfg.Batch, cfg.Seq, cfg.Steps, cfg.Zero, cfg.Prefetch = 2, 32, 4, 3, 1
	cfg.Trace = filepath.Join(t.TempDir(), "trace.json")
	overProcesses(t, cfg, 2, 2, runOf)
	text, err := os.ReadFile(cfg.Trace)
	require.NoError(t, err)
	var trace struct {
		TraceEvents []struct {
			Name, Ph string
			Pid, Tid int
			Ts, Dur  float64
			Args     struct{ Kind graph.Kind }
		}
	}
	require.NoError(t, json.Unmarshal(text, &trace))
	type span struct{ from, to float64 }
	var gathers, work [4][]span
	for _, e := range trace.TraceEvents {
		if e.Ph != "X" || e.Args.Kind == "" {
			continue
		}
		s := span{e.Ts, e.Ts + e.Dur}
		switch id := graph.StreamID(e.Tid); {
		case id == graph.Comm && e.Args.Kind == graph.AllGather:
			gathers[e.Pid] = append(gathers[e.Pid], s)
		case id == graph.Compute:
			work[e.Pid] = append(work[e.Pid], s)
		}
	}
	for rank := range gathers {
		require.NotEmpty(t, work[rank])
		require.Equal(t, len(gathers[0]), len(gathers[rank]))
		overlap := 0.0
		for i, g := range gathers[rank] {
			require.Less(t, gathers[0][i].from, g.to, "gather %d ends once all have come", i)
			require.Less(t, g.from, gathers[0][i].to)
			for _, w := range work[rank] {
				overlap += max(0, min(g.to, w.to)-max(g.from, w.from))
			}
		}
		require.Positive(t, overlap, "rank %d", rank)
	}
}

// TestAProcessWithAnotherPlan checks that a process whose plan differs from the leader's reports it
// and runs nothing.
func TestAProcessWithAnotherPlan(t *testing.T) {
	leader, others := joined(t, 2)
	ends := make(chan error)
	go func() {
		_, err := Work(context.Background(), others[0], nil)
		ends <- err
	}()
	c := tiny("gpt2")
	c.Config = c.Config.Over(leader)
	var text bytes.Buffer
	require.NoError(t, gob.NewEncoder(&text).Encode(job.Assignment{Config: c.Config, Threads: 1}))
	_, err := leader.Links[0].Welcome()
	require.NoError(t, err)
	require.NoError(t, leader.Links[0].Assign(run.Task{Config: text.Bytes(), Program: "another"}))
	err = leader.Links[0].Opened()
	require.ErrorContains(t, err, "rank 1 (host ")
	require.ErrorContains(t, err, "its plan is another program (")
	require.NoError(t, <-ends, "the leader tells")
}

// refusing is a transport whose Join fails.
type refusing struct{}

func (refusing) Join([]graph.Axis, []int, time.Duration, func(string)) (platform.Joined, error) {
	var none *shm.World
	return none, errors.New("there is no place")
}

// TestATransportThatRefuses checks that only the leader reports that the transport refused the job.
func TestATransportThatRefuses(t *testing.T) {
	leader, others := joined(t, 2)
	leader.Transport, others[0].Transport = refusing{}, refusing{}
	ends := make(chan error)
	go func() {
		began, err := Work(context.Background(), others[0], nil)
		if err != nil {
			require.False(t, began, "or it would tell: %v", err)
		}
		ends <- err
	}()
	c := tiny("gpt2")
	c.Config = c.Config.Over(leader)
	_, err := c.start(context.Background())
	require.ErrorContains(t, err, "there is no place")
	<-ends
}

// TestRanksOfAProcess checks that the ranks of a process are consecutive, and how messages name
// them.
func TestRanksOfAProcess(t *testing.T) {
	c := config.Config{LocalRanks: 3}
	c = c.Within(&job.Job{Process: 2, Processes: 4})
	c.Ranks = 12
	require.Equal(t, []int{6, 7, 8}, job.World(&c).Local)
	require.Equal(t, "ranks 6 to 8", platform.Names(job.World(&c).Local))
	require.Equal(t, "rank 6", platform.Names([]int{6}))
	h := run.Hello{Rank: 2, LocalRanks: 2, LocalRank: 0}.In(3)
	require.True(t, h.Aligned())
	require.False(t, slices.Contains(job.World(&c).Local, h.Rank+h.LocalRanks))
}
