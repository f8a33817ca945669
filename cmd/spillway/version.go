package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// version is set by releases: -ldflags "-X main.version=v1.2.3".
var version = ""

// versionText is what --version prints after the command's name: the release or
// the module's version, the commit where the build knows it, Go and the platform.
func versionText() string {
	v, commit := version, ""
	if info, ok := debug.ReadBuildInfo(); ok {
		if v == "" && info.Main.Version != "(devel)" {
			v = info.Main.Version
		}
		changed := false
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				commit = s.Value[:min(12, len(s.Value))]
			case "vcs.modified":
				changed = s.Value == "true"
			}
		}
		if commit != "" && changed {
			commit += " with changes"
		}
	}
	if v == "" {
		v = "development version"
	}
	if commit != "" {
		v += " (" + commit + ")"
	}
	return fmt.Sprintf("%s, %s, %s/%s", v, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
