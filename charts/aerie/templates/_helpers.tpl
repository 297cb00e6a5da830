{{/* Name of a Service: begins with a letter, has no dot, and is short enough for a suffix within its 63 characters. */}}
{{- define "aerie.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride }}
{{- else }}
{{- $name := .Release.Name | replace "." "-" }}
{{- if not (contains .Chart.Name $name) }}
{{- $name = printf "%s-%s" $name .Chart.Name }}
{{- end }}
{{- if not (regexMatch "^[a-z]" $name) }}
{{- $name = printf "%s-%s" .Chart.Name $name }}
{{- end }}
{{- $name | trunc 46 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "aerie.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "aerie.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "aerie.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "aerie.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "aerie.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "aerie.image" -}}
{{- with .Values.image }}
{{- if .digest }}
{{- printf "%s@%s" .repository .digest }}
{{- else }}
{{- printf "%s:%s" .repository (default $.Chart.AppVersion .tag) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Secret of the release's namespace with the key of all tokens of drafter endpoints. */}}
{{- define "aerie.drafterKeySecret" -}}
{{- default (printf "%s-drafter-key" (include "aerie.fullname" .)) .Values.drafterKey.existingSecret }}
{{- end }}

{{/* Permissions of the operator: rules of a ClusterRole, or of a Role in each namespace. */}}
{{- define "aerie.rules" -}}
- apiGroups: [aerie.dev]
  resources: [speculativedeployments]
  verbs: [get, list, watch]
- apiGroups: [aerie.dev]
  resources: [speculativedeployments/status]
  verbs: [patch]
# Children name the resource as their owner and block its deletion until they are deleted. The admission plugin
# OwnerReferencesPermissionEnforcement requires this permission.
- apiGroups: [aerie.dev]
  resources: [speculativedeployments/finalizers]
  verbs: [update]
{{- $children := list
  (dict "group" "apps" "resource" "deployments")
  (dict "group" "" "resource" "services")
  (dict "group" "" "resource" "configmaps")
  (dict "group" "policy" "resource" "poddisruptionbudgets")
  (dict "group" "batch" "resource" "jobs")
  (dict "group" "gateway.networking.k8s.io" "resource" "httproutes")
}}
{{- range $children }}
- apiGroups: [{{ .group | quote }}]
  resources: [{{ .resource }}]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
# Tokens of the endpoints by which drafters change in place. No Secret here can be read: a patch, too, would answer with it.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
# Causes of pods that do not start, and the last log lines of a preflight or a crash.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
# Events about rollouts; and the reason why a Job has no pod, which is only in events.
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [list, create, patch]
{{- end }}

{{/* File of the receivers of notifications, which the operator reads. */}}
{{- define "aerie.notificationsConfig" -}}
{{ dict "receivers" .Values.notifications.receivers "subscriptions" .Values.notifications.subscriptions | toYaml }}
{{- end -}}
