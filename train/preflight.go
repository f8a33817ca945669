package train

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/train/initial"
	"github.com/spillway-ml/spillway/train/saving"
)

// MachineTooSmall is the error for a run whose ranks together plan more memory than the machine
// has, whatever their caps. The system would kill it midway.
type MachineTooSmall struct {
	Ranks   int
	Planned int64  // bytes of device (CPU) and host memory over all ranks
	Total   int64  // bytes of memory and swap available to the ranks
	Host    string // in a job over processes, the host with the least memory; "": this machine
}

func (e *MachineTooSmall) Error() string {
	where := "this machine"
	if e.Host != "" {
		where = "host " + e.Host
	}
	return fmt.Sprintf("does not fit: %s on %s plan %s of memory together and it has %s", english.Plural(e.Ranks, "rank", ""), where, plan.Bytes(e.Planned), plan.Bytes(e.Total))
}

// onThisMachine refuses a plan that this machine's memory can't hold. spaces are those whose arenas
// are in that memory, and hw predicts which plans would fit. On systems that do not report their
// memory it allows every plan.
func onThisMachine(
	ctx context.Context, r *planner.Resolved, p *plan.Plan, spaces []graph.Space, hw planner.Hardware,
) error {
	machine, rank := planner.MachineOf(&r.Config), planner.InMemory(p, spaces)
	if machine.Holds(rank) {
		return nil
	}
	return r.TooSmall(ctx, &MachineTooSmall{machine.Ranks, rank * int64(machine.Ranks), machine.Bytes, machine.Host}, hw)
}

// openOutputs checks every path that the run will write to, before it starts.
func (t *Trainer) openOutputs(ctx context.Context) error {
	c := t.cfg
	if err := t.openSaver(ctx); err != nil {
		return err
	}
	if c.Trace != "" {
		if err := canWriteAside(c.Trace); err != nil {
			return fmt.Errorf("Config.Trace: %w", err)
		}
	}
	return nil
}

// Preflight makes checks of New before a search for a run's configuration: the folder of
// checkpoints, the scale of adapters in Config.Init, the tokenizer, the template and the data. Of
// data larger than smallData it reads only the first record.
func Preflight(ctx context.Context, c config.Config) error {
	if err := saving.Look(&c, filesys.System); err != nil {
		return err
	}
	if err := canMake("Config.Checkpoint", c.Checkpoint); err != nil {
		return err
	}
	if err := initial.Same(ctx, &c); err != nil {
		return err
	}
	if c.Own.Model != nil || c.Own.Data != nil {
		return nil
	}
	r, err := request{Config: c}.resolve()
	if err != nil {
		return err
	}
	t := &Trainer{cfg: r}
	return t.lookAtData(ctx)
}

// canMake refuses the folder of a field if it cannot be written or created.
func canMake(field, folder string) error {
	if folder == "" {
		return nil
	}
	at := folder // or the lowest existing folder above it
	for _, err := os.Stat(at); err != nil; _, err = os.Stat(at) {
		above, name := filesys.Above(at)
		if name == "" {
			return nil // opening the folder reports the error
		}
		at = above
	}
	err := canWriteIn(at)
	if why := (*fs.PathError)(nil); errors.As(err, &why) {
		return config.Refuse("%s %s: folder %s can't be written: %w; give a folder that can", field, folder, at, why.Err)
	}
	return err
}

// smallData is the most data, in bytes, that Preflight reads completely. It tokenizes that in about
// a second.
const smallData = 8 << 20

// lookAtData is openData before the run is planned.
func (t *Trainer) lookAtData(ctx context.Context) error {
	chat, err := t.conversations()
	if err != nil {
		return err
	}
	c := t.cfg
	if t.tokenizer, err = openTokenizer(&c.Config, nil, c.Shape.Vocab); err != nil {
		return err
	}
	evalChat, err := data.IsConversations(c.EvalData, data.Options{TextField: c.TextField, Glob: c.EvalGlob})
	if err != nil {
		return fmt.Errorf("%s: %w", evalDataField, err)
	}
	if chat || evalChat {
		template, err := readTemplate(&c.Config)
		if err == nil {
			_, err = data.NewDialog(t.tokenizer, template)
		}
		if err != nil {
			return err
		}
	}
	for _, d := range []struct {
		field, path, glob  string
		chat, held, wanted bool
	}{
		{trainField, c.Data, c.DataGlob, chat, false, true},
		{trainField, c.Data, c.DataGlob, chat, true, c.EvalSplit > 0},
		{evalDataField, c.EvalData, c.EvalGlob, evalChat, false, true},
	} {
		if d.path == "" || !d.wanted {
			continue
		}
		if err := data.Readable(d.path); err != nil {
			return fmt.Errorf("%s: %w", d.field, err)
		}
		if data.Size(d.path, data.Options{Glob: d.glob, TextField: c.TextField}) > smallData {
			continue
		}
		var opened io.Closer
		if d.chat {
			opened, _, err = t.readChat(ctx, d.field, d.path, d.glob, d.held)
		} else {
			opened, _, err = t.readText(ctx, d.field, d.path, d.held)
		}
		if err == nil {
			err = opened.Close()
		}
		if err != nil {
			return err
		}
	}
	return nil
}
