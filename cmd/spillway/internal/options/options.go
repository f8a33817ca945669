// Package options is train's flags and what is refused of them before a run.
package options

import (
	"cmp"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/planner"
)

// ListenAddress is what --metrics-addr means: a port alone, and a missing host, are
// this machine's loopback.
func ListenAddress(addr string) (string, error) {
	wrong := fmt.Errorf("--metrics-addr %.80q: want HOST:PORT or PORT", addr)
	if !strings.Contains(addr, ":") {
		addr = ":" + addr
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", wrong
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return "", wrong
	}
	if host == "" {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port), nil
}

// checkAddress refuses a --metrics-addr that can't be one, before there is a run.
func checkAddress(addr string) error {
	if addr == "" {
		return nil
	}
	_, err := ListenAddress(addr)
	return err
}

// RefuseUnderOne refuses what counts from 1 and was given as less: 0 means inside that it
// was not given, and is no value of a flag.
func RefuseUnderOne(fs *pflag.FlagSet) error {
	for _, f := range []struct{ flag, what, without string }{
		{"seq", "token", "the smaller of 256 and the model's positions"},
		{"global-batch", "row", "--batch and --accum as they are"},
		{"epochs", "epoch", "--steps"},
		{"shard-size", "rank", "all ranks"},
		{"tensor", "rank", "whole layers"},
		{"pipeline", "stage", "one stage"},
	} {
		if n, err := fs.GetInt(f.flag); err == nil && fs.Changed(f.flag) && n < 1 {
			return fmt.Errorf("--%s %d: at least 1 %s is needed; leave it out for %s", f.flag, n, f.what, f.without)
		}
	}
	return nil
}

// MinRanks is --min-ranks where it may stand in a config file that is read as a whole later.
func MinRanks(flags *pflag.FlagSet) (n int) {
	if path := flags.Lookup("config").Value.String(); path != "" && !flags.Changed("min-ranks") {
		flags = TrainSet()
		_ = cli.ApplyConfigFile(flags, path) // rank 0 tells
	}
	n, _ = flags.GetInt("min-ranks")
	return n
}

// refuseEpochs refuses two lengths of a run.
func refuseEpochs(fs *pflag.FlagSet) error {
	if fs.Changed("epochs") && fs.Changed("steps") {
		return fmt.Errorf("--epochs %s with --steps %s: each says how long the run is; leave one out", fs.Lookup("epochs").Value, fs.Lookup("steps").Value)
	}
	return nil
}

// JobFlags binds the flags about a job's processes, and returns --transport's value.
func JobFlags(fs *pflag.FlagSet, c *config.Config) (transport *string) {
	fs.IntVar(&c.ShardSize, "shard-size", 0, "shard over groups of `N` ranks and replicate over the groups (HSDP; in bf16 and fp16 with last bits of its own; default: shard over all)")
	MeshFlags(fs, c)
	fs.IntVar(&c.LocalRanks, "ranks-per-process", 0, "ranks that each process runs; --ranks is then all of them, and may be left out (default: 1 in a job over processes)")
	transport = fs.String("transport", cluster.Auto, "how ranks meet: auto, inproc (one process), shm (spillway launch), mpi (mpirun) or nccl (--device cuda over processes)")
	fs.Int("min-ranks", 0, "where processes are lost go on with those that are left, down to `M`: for jobs over NCCL alone (NCCL_COMM_ID), from --checkpoint; NCCL 2.27 or later (others: launch --min-ranks)")
	return transport
}

// MeshFlags binds the flags of tensor and pipeline parallelism.
func MeshFlags(fs *pflag.FlagSet, c *config.Config) {
	fs.IntVar(&c.Tensor, "tensor", 1,
		"share every layer over groups of `T` neighbouring ranks, a power of two, which have the same data (tensor parallelism; CPU ranks)")
	fs.IntVar(&c.TensorSlices, "tensor-slices", 0,
		"cut layers into `S` slices, a power of two; every --tensor that divides it gives the same bits (default: --tensor)")
	fs.IntVar(&c.Pipeline, "pipeline", 1,
		"divide the layers over `P` stages, each with as many of the ranks, which take the --accum micro-batches in turn (pipeline parallelism; CPU ranks, --zero 0 or 1)")
	fs.StringVar(&c.PipelineSchedule, "pipeline-schedule", "1f1b",
		"order of the micro-batches in a pipeline: 1f1b, which keeps the activations of at most --pipeline of them on a stage, or gpipe, all forwards and then all backwards")
	fs.StringVar(&c.Stages, "stages", "", "layers of each stage of a pipeline in turn, as in 0-5,6-11 (default: divided by predicted time)")
}

// FollowPipeline makes a ZeRO stage that is left open one that a pipeline has.
func FollowPipeline(fs *pflag.FlagSet, c *config.Config) {
	if c.Pipelined() && !fs.Changed("zero") {
		c.Zero = 1
	}
}

// TrainSet is a set of train's flags that no command has: for who reads some of them.
func TrainSet() *pflag.FlagSet {
	fs := pflag.NewFlagSet("train", pflag.ContinueOnError)
	var c config.Config
	Train(fs, &c, &Later{})
	JobFlags(fs, &c)
	return fs
}

// Meeting is how and on what device ranks are to meet by the flags and the config file,
// which is read as a whole later: what is wrong with it is rank 0's to tell, where ranks
// meet.
func Meeting(fs *pflag.FlagSet, path string) (transport, device string, err error) {
	both := TrainSet()
	for _, name := range []string{"transport", "device"} {
		if f := fs.Lookup(name); f.Changed {
			_ = both.Set(name, f.Value.String()) // a word, which any text is
		}
	}
	err = cli.ApplyConfigFile(both, path)
	return both.Lookup("transport").Value.String(), both.Lookup("device").Value.String(), err
}

// FixedBy are the choices that a command line has made, which --fit leaves as they are.
func FixedBy(fs *pflag.FlagSet) planner.Fixed {
	return planner.Fixed{Zero: fs.Changed("zero"), Prefetch: fs.Changed("prefetch"), Batch: fs.Changed("batch"), Accum: fs.Changed("accum"),
		AccumOrder: fs.Changed("accum-order"), Precision: fs.Changed("precision"), Recompute: fs.Changed("recompute"), Offload: fs.Changed("offload")}
}

// Settle applies the config file or the demo's values below the flags, and
// refuses what is not built.
func Settle(fs *pflag.FlagSet, c *config.Config, l *Later) (isDemo bool, err error) {
	isDemo = !fs.Changed("model") && !fs.Changed("data") && !fs.Changed("config")
	demoGlob := isDemo && !fs.Changed("data-glob")
	defer func() {
		if !demoGlob { // the demo's own pattern is for Go's source alone
			c.EvalGlob = c.DataGlob
		}
	}()
	if isDemo {
		if !fs.Changed("checkpoint") { // a folder of the user's own is not replaced
			c.CheckpointMark = DemoMark
		}
		if err := ApplyDemo(fs); err != nil {
			return true, err
		}
	}
	if path := fs.Lookup("config").Value.String(); path != "" {
		if err := cli.ApplyConfigFile(fs, path); err != nil {
			return false, err
		}
	}
	if err := cmp.Or(RefuseUnderOne(fs), l.Refuse()); err != nil {
		return isDemo, err
	}
	FollowPipeline(fs, c)
	return isDemo, cmp.Or(refuseEpochs(fs), c.Validate(), checkAddress(c.MetricsAddr), cli.RefuseOverwriting(fs), l.refuseExport(c), l.refuseAllow(c))
}
