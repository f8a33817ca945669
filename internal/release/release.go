// Package release reports the version of this build.
package release

import "runtime/debug"

// Releases set these: -ldflags "-X PACKAGE.version=v1.2.3 -X PACKAGE.commit=0123456789ab", where PACKAGE is this one.
var version, commit string

// Text is the version and the commit of this build, as far as it knows them.
func Text() string {
	v, at := version, commit
	if info, ok := debug.ReadBuildInfo(); ok {
		if v == "" && info.Main.Version != "(devel)" {
			v = info.Main.Version
		}
		changed := false
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				at = s.Value[:min(12, len(s.Value))]
			case "vcs.modified":
				changed = s.Value == "true"
			}
		}
		if at != "" && changed {
			at += " with changes"
		}
	}
	if v == "" {
		v = "development version"
	}
	if at != "" {
		v += " (" + at + ")"
	}
	return v
}
