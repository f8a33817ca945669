package receipts

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/receipt"
	"github.com/spillway-ml/spillway/train/saving"
)

// RefuseOld refuses a file that is not a receipt, or is the receipt of a run that this one does not
// resume.
func RefuseOld(c *config.Config, folders filesys.Opener) error {
	if c.Receipt == "" {
		return nil
	}
	holds, err := receipt.Holds(folders, c.Receipt)
	if err != nil {
		return fmt.Errorf("Config.Receipt %.80q: %w; give another file", c.Receipt, err)
	}
	if holds && !c.Resume {
		return config.Refuse("Config.Receipt %.80q holds the receipt of another run; give Config.Resume to go on with that run, or another file", c.Receipt)
	}
	return nil
}

// Follow returns the path of the run's receipt. For a resumed run it is the one that the newest
// checkpoint names, unless Config.Receipt names another. note says which one is used.
func Follow(c *config.Config, folders filesys.Opener) (path, note string, err error) {
	given := c.Receipt
	if !c.Resume || c.Checkpoint == "" || c.Inference {
		return given, "", nil
	}
	d, err := checkpoint.OpenDir(folders, c.Checkpoint)
	var entries []checkpoint.Entry
	if err == nil {
		entries, err = d.Scan()
		err = errors.Join(err, d.Close())
	}
	if err != nil {
		return "", "", fmt.Errorf("Config.Checkpoint %s: %w", c.Checkpoint, err)
	}
	named, until, newest := "", 0, 0 // the last receipt, the last step in it, and the last step
	for _, e := range slices.Backward(entries) {
		var was saving.Record
		if e.Err != nil || json.Unmarshal(e.Manifest.Run, &was) != nil {
			continue
		}
		newest = max(newest, e.Step)
		if named, until = was.ReceiptPath(c.Checkpoint), e.Step; named != "" {
			break
		}
	}
	gap := ""
	if until < newest {
		gap = fmt.Sprintf(", steps %d to %d in none", until+1, newest)
	}
	switch {
	case named == "":
		return given, "", nil
	case given != "":
		if holds, err := receipt.Holds(folders, given); err == nil && !holds {
			note = fmt.Sprintf("receipt: steps until %d are in %s%s, and those from here on in %s: "+
				"verify checks each by its own Config.Receipt", until, named, gap, given)
		}
		return given, note, nil
	case gap != "":
		c.Warnf("the run had a receipt until step %d, %.80q: steps from here on are in none; "+
			"give Config.Receipt, that file or a new one", until, named)
		return "", "", nil
	}
	if strings.EqualFold(c.Device, "cuda") {
		c.Warnf("the run has a receipt, %.80q, and on Config.Device cuda it can't go on: steps from here on are in none", named)
		return "", "", nil
	}
	if holds, err := receipt.Holds(folders, named); err != nil || !holds {
		c.Warnf("the run's receipt %.80q is not there, and steps from here on are in none; give Config.Receipt, the file where it lies now or a new one", named)
		return "", "", nil
	}
	return named, fmt.Sprintf("receipt: going on in %s, as Config.Checkpoint says; Config.Receipt would name another file", named), nil
}
