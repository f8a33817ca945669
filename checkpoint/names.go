package checkpoint

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	prefix      = "step-"
	tempPrefix  = ".writing-"  // a checkpoint being written
	gonePrefix  = ".removing-" // one being removed
	lockName    = ".spillway-lock"
	marksName   = ".spillway-marks"
	largestStep = 1<<53 - 1 // the largest integer that JSON numbers keep exactly

	// In a checkpoint's folder.
	manifestName = "manifest.json"
	tensorsExt   = ".safetensors" // suffix of the names of tensor files
)

// Name is the canonical name of a checkpoint's folder: step-00000100, or step-00000100.2 for a
// second one of that step if the first can't be used.
func Name(step, copy int) string {
	if copy <= 1 {
		return fmt.Sprintf("%s%08d", prefix, step)
	}
	return fmt.Sprintf("%s%08d.%d", prefix, step, copy)
}

// parseName reads a canonical name. Other spellings (step-1, step-+5) are not checkpoints of
// ours.
func parseName(name string) (step, copy int, ok bool) {
	digits, found := strings.CutPrefix(name, prefix)
	if !found {
		return 0, 0, false
	}
	digits, second, twice := strings.Cut(digits, ".")
	step, err := strconv.Atoi(digits)
	if err != nil || step < 0 || step > largestStep {
		return 0, 0, false
	}
	copy = 1
	if twice {
		if copy, err = strconv.Atoi(second); err != nil || copy < 2 {
			return 0, 0, false
		}
	}
	return step, copy, Name(step, copy) == name
}

// ownTemp matches the temporary names of a Store. Such a name is removed only if the store's
// own marks file lists it.
var ownTemp = regexp.MustCompile(`^\.(writing|removing)-[a-z0-9.-]+-[0-9a-f]{32}$`)

// random returns 128 random bits as hexadecimal digits.
func random() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: without randomness the process ends
	return hex.EncodeToString(b[:])
}

// OwnFiles returns the names of the files that a Store keeps beside checkpoints.
func OwnFiles() []string { return []string{lockName, marksName} }

// Reserved tells whether a name in a checkpoint folder is a Store's, which may make it or has
// made it: a checkpoint's, a temporary one, or one of OwnFiles.
func Reserved(name string) bool {
	_, _, is := parseName(name)
	return is || ownTemp.MatchString(name) || slices.Contains(OwnFiles(), name)
}
